"""The seam between two sub-layers: unfold the result into the streams, fold them for the next one, normalise."""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """round(w * (x * rsqrt(mean x^2 + eps))) over the last axis, fp32 inside, x's dtype out."""
    v = x.float()
    return (weight.float() * (v * torch.rsqrt(v.square().mean(-1, keepdim=True) + eps))).to(x.dtype)


def fold(streams: torch.Tensor, pre: torch.Tensor) -> torch.Tensor:
    """sum_i pre[i] * X[i]: streams [T, m, D], pre fp32 [T, m] to [T, D] in the streams' dtype."""
    return (pre.unsqueeze(-1) * streams.float()).sum(1).to(streams.dtype)


def unfold(y: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, mix: torch.Tensor) -> torch.Tensor:
    """post[j] * y + sum_i mix[i, j] * X[i]: y [T, D], mix fp32 [T, m, m] to new streams [T, m, D]."""
    mixed = torch.matmul(mix.transpose(1, 2), streams.float())
    return (post.unsqueeze(-1) * y.float().unsqueeze(1) + mixed).to(streams.dtype)
