"""Sparse attention over gathered vectors that are key and value at once, with a sink logit per head."""

from __future__ import annotations

import torch


def sparse_attention(
    q: torch.Tensor, keys: torch.Tensor, valid: torch.Tensor, sink: torch.Tensor, scale: float, wide: bool = False
) -> torch.Tensor:
    """One softmax over all given vectors of a row.

    q [T, H, d], keys [T, N, d] (invalid ones must be zero), valid bool [T, N], sink fp32 [H]; returns [T, H, d] in q's
    dtype. Probabilities are rounded to q's dtype for the product with the values, the denominator sums them unrounded;
    the sink enlarges the denominator only. A row without any vector gives 0.
    """
    acc = torch.float64 if wide else torch.float32
    k = keys.to(acc)
    z = torch.matmul(q.to(acc), k.transpose(1, 2)).float() * scale
    z = torch.where(valid.unsqueeze(1), z, float("-inf"))
    m = z.amax(-1, keepdim=True)
    # A row without keys must stay finite, also in the sink's gradient; elsewhere a sums to at least 1.
    m = torch.where(torch.isneginf(m), 0.0, m)
    a = torch.exp(z - m)
    denominator = (a.sum(-1, keepdim=True) + torch.exp(sink.unsqueeze(-1) - m)).clamp(min=1e-30)
    return (torch.matmul(a.to(q.dtype).to(acc), k).float() / denominator).to(q.dtype)
