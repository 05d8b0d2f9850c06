"""Hyper-connections: coefficients against published numbers, folding and unfolding by their definition."""

from __future__ import annotations

import torch

from precede.model.ops.coefficients import coefficients
from precede.model.ops.seam import fold, rms_norm, unfold


def published_coefficients() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Streams and a matrix whose mixes are ((7k mod 11) - 5) / 4."""
    mix = ((7 * torch.arange(24)) % 11 - 5) / 4
    streams = torch.ones(1, 4, 8)  # mean of squares 1, so the RMS factor is 1
    fn = (mix / 32).unsqueeze(1).expand(24, 32).contiguous()
    return coefficients(streams, fn, torch.zeros(24), torch.tensor([0.5, 1.0, 1.5]), 20, 1e-6, 1e-20)


def test_published_split() -> None:
    pre, post, mix = published_coefficients()
    want_pre = torch.tensor([[0.348646, 0.562178, 0.437825, 0.651356]])
    want_post = torch.tensor([[1.124353, 0.641643, 1.462117, 1.0]])
    want_mix = torch.tensor(
        [
            [0.133947, 0.478847, 0.253258, 0.133947],
            [0.253258, 0.014635, 0.478849, 0.253258],
            [0.133947, 0.478847, 0.253258, 0.133947],
            [0.478848, 0.027670, 0.014635, 0.478847],
        ]
    )
    torch.testing.assert_close(pre, want_pre, atol=2e-6, rtol=0)
    torch.testing.assert_close(post, want_post, atol=2e-6, rtol=0)
    torch.testing.assert_close(mix[0], want_mix, atol=2e-6, rtol=0)


def test_mix_is_nearly_doubly_stochastic_and_ends_with_columns() -> None:
    g = torch.Generator().manual_seed(3)
    streams, fn = torch.randn(6, 4, 16, generator=g), torch.randn(24, 64, generator=g) / 8
    _, post, mix = coefficients(streams, fn, torch.randn(24, generator=g), torch.ones(3), 20, 1e-6, 1e-20)
    torch.testing.assert_close(mix.sum(1), torch.ones(6, 4), atol=3e-6, rtol=0)
    torch.testing.assert_close(mix.sum(2), torch.ones(6, 4), atol=2e-2, rtol=0)
    assert bool(((post > 0) & (post < 2)).all())


def test_fold_and_unfold_by_definition() -> None:
    g = torch.Generator().manual_seed(4)
    streams, y = torch.randn(3, 4, 5, generator=g), torch.randn(3, 5, generator=g)
    pre, post, mix = (torch.rand(*s, generator=g) for s in ((3, 4), (3, 4), (3, 4, 4)))
    folded = sum(pre[:, i, None] * streams[:, i] for i in range(4))
    torch.testing.assert_close(fold(streams, pre), folded)
    for j in range(4):
        want = post[:, j, None] * y + sum(mix[:, i, j, None] * streams[:, i] for i in range(4))
        torch.testing.assert_close(unfold(y, streams, post, mix)[:, j], want)


def test_norm_of_zeros_is_zero() -> None:
    assert not rms_norm(torch.zeros(2, 8, dtype=torch.bfloat16), torch.ones(8), 1e-20).any()
