"""Rotary frequencies and rotation."""

from __future__ import annotations

import torch

from precede.model.config import ModelConfig
from precede.model.rope import frequencies, rotate, rotation

PUBLISHED = ModelConfig.preset("published")


def test_yarn_frequencies() -> None:
    f = frequencies(PUBLISHED, yarn=True)
    want = {
        0: 1.0,
        14: 0.00528685655,
        15: 0.00363553851,
        16: 0.00226562493,
        20: 0.000296977785,
        24: 1.95312532e-05,
        25: 5.37231244e-06,
        31: 5.6805294e-07,
    }
    for i, value in want.items():
        torch.testing.assert_close(f[i].item(), value, rtol=3e-7, atol=0)


def test_plain_frequencies() -> None:
    f = frequencies(PUBLISHED, yarn=False)
    torch.testing.assert_close(f[1].item(), 0.749894202, rtol=2e-7, atol=0)
    torch.testing.assert_close(f[31].item(), 0.00013335215, rtol=2e-7, atol=0)


def test_adjacent_pairs_of_the_tail_turn() -> None:
    by = rotation(torch.tensor([0, 1]), torch.tensor([torch.pi / 2, torch.pi]))
    x = torch.tensor([[9.0, 8.0, 1.0, 2.0, 3.0, 4.0]] * 2)
    y = rotate(x, by)
    assert torch.equal(y[0], x[0])
    torch.testing.assert_close(y[1], torch.tensor([9.0, 8.0, -2.0, 1.0, -3.0, -4.0]), atol=1e-6, rtol=0)


def test_inverse_turns_back_and_heads_share_the_angle() -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(5, 3, 96, generator=g)
    by = rotation(torch.tensor([0, 7, 1000, 65535, 1048575]), frequencies(PUBLISHED, yarn=True))
    y = rotate(x, by)
    assert torch.equal(y[..., :32], x[..., :32])
    torch.testing.assert_close(rotate(y, by, inverse=True), x, atol=1e-5, rtol=0)
    torch.testing.assert_close(y[:, 1], rotate(x[:, 1], by))
    # A rotation keeps products of two vectors turned by the same angle.
    torch.testing.assert_close((y * y).sum(-1), (x * x).sum(-1), rtol=1e-5, atol=0)
