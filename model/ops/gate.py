"""The router: scores of all experts, a biased choice, unbiased weights; and the op that stands for all of it."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .linear import product
from .registry import op
from .select import best_indices


def route(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    bias_vl: torch.Tensor,
    image: torch.Tensor,
    topk: int,
    scale: float,
    wide: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose `topk` experts a row.

    x [T, D], weight [E, D] any float; bias, bias_vl fp32 [E]; image bool [T]. Returns weights fp32 [T, k] that sum to
    `scale`, and ids int64 [T, k] by falling biased score; equal scores go to the smaller id. Only the choice sees the
    bias. A row of NaN still gets different ids within range.
    Formula: s = sqrt(softplus(x W^T)); w = s / (sum s + 1e-20) * scale over the chosen.
    """
    scores = F.softplus(product(x, weight, wide)).sqrt()
    ranked = scores + torch.where(image.unsqueeze(1), bias_vl, bias)
    ids = best_indices(ranked, topk)
    chosen = scores.gather(1, ids)
    return chosen / (chosen.sum(-1, keepdim=True) + 1e-20) * scale, ids


def _inputs(g: torch.Generator) -> tuple[object, ...]:
    x, weight = torch.randn(9, 64, generator=g), torch.randn(16, 64, generator=g) / 8
    bias, bias_vl = torch.rand(16, generator=g), torch.rand(16, generator=g)
    return x, weight, bias, bias_vl, torch.rand(9, generator=g) < 0.3, 4, 1.5


op(
    "mega_gate(Tensor x, Tensor weight, Tensor bias, Tensor bias_vl, Tensor image, int topk, float scale)"
    " -> (Tensor weights, Tensor ids)",
    fake=lambda x, weight, bias, bias_vl, image, topk, scale: (
        x.new_empty((x.shape[0], topk), dtype=torch.float32),
        x.new_empty((x.shape[0], topk), dtype=torch.int64),
    ),
    inputs=_inputs,
    tolerance=1e-5,
)(route)
