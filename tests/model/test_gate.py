"""The router: published scores, who sees the bias, ties, extremes; the op equals the plain form."""

from __future__ import annotations

import pytest
import torch

from precede.model.ops.gate import route

NO_IMAGE = torch.zeros(1, dtype=torch.bool)


def scores(*logits: float) -> torch.Tensor:
    """Weights of all experts times their sum: the scores up to that factor."""
    weight = torch.tensor(logits).unsqueeze(1)
    w, ids = route(
        torch.ones(1, 1), weight, torch.zeros(len(logits)), torch.zeros(len(logits)), NO_IMAGE, len(logits), 1.0
    )
    return w[0, ids[0].argsort()]


def test_published_scores() -> None:
    want = torch.tensor([0.356270, 0.832555, 1.145976, 1.746020])
    torch.testing.assert_close(scores(-2, 0, 1, 3), want / want.sum(), atol=1e-6, rtol=0)


def test_bias_chooses_but_does_not_weigh() -> None:
    g = torch.Generator().manual_seed(0)
    x, weight = torch.randn(7, 32, generator=g), torch.randn(12, 32, generator=g)
    bias, bias_vl = torch.rand(12, generator=g) * 4, torch.rand(12, generator=g) * 4
    image = torch.tensor([True, False, True, False, False, True, False])
    w, ids = route(x, weight, bias, bias_vl, image, 3, 1.5)
    s = torch.nn.functional.softplus(x @ weight.T).sqrt()
    ranked = s + torch.where(image[:, None], bias_vl, bias)
    assert torch.equal(ids, ranked.topk(3).indices)
    chosen = s.gather(1, ids)
    torch.testing.assert_close(w, chosen / chosen.sum(1, keepdim=True) * 1.5)


def test_equal_scores_go_to_the_smaller_id_in_falling_order() -> None:
    x, weight = torch.ones(1, 4), torch.zeros(6, 4)
    bias = torch.tensor([0.0, 1.0, 0.0, 1.0, 0.0, 0.0])
    _, ids = route(x, weight, bias, bias, NO_IMAGE, 4, 1.0)
    assert ids.tolist() == [[1, 3, 0, 2]]


@pytest.mark.parametrize("logit", [-200.0, 19.99, 20.01, 100.0])
def test_extreme_logits_stay_finite(logit: float) -> None:
    w, ids = route(torch.ones(1, 1), torch.full((5, 1), logit), torch.zeros(5), torch.zeros(5), NO_IMAGE, 3, 1.5)
    assert ids.tolist() == [[0, 1, 2]]
    assert torch.isfinite(w).all()


def test_a_nan_row_gets_different_ids_and_spoils_no_other() -> None:
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
    clean, _ = route(x, torch.eye(8), torch.zeros(8), torch.zeros(8), NO_IMAGE.expand(3), 4, 1.0)
    x[1] = float("nan")
    w, ids = route(x, torch.eye(8), torch.zeros(8), torch.zeros(8), NO_IMAGE.expand(3), 4, 1.0)
    assert ids[1].tolist() == [0, 1, 2, 3]
    assert torch.equal(w[[0, 2]], clean[[0, 2]])


def test_op_equals_the_plain_form_bit_for_bit() -> None:
    g = torch.Generator().manual_seed(2)
    args = (
        torch.randn(33, 64, generator=g).bfloat16(),
        torch.randn(24, 64, generator=g).bfloat16(),
        torch.rand(24, generator=g),
        torch.rand(24, generator=g),
        torch.rand(33, generator=g) < 0.5,
        6,
        1.5,
    )
    for a, b in zip(route(*args), torch.ops.precede.mega_gate(*args), strict=True):
        assert torch.equal(a, b)
