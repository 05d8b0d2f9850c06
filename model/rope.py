"""Rotary embedding of the last `qk_rope_head_dim` elements, adjacent pairs, with YaRN where a layer compresses.

Layers of ratio 0 use `rope_theta` and no scaling. Layers of ratio > 0 use `compress_rope_theta` with YaRN for all that
they rotate. YaRN changes frequencies only; there is no magnitude factor.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils import _pytree as pytree

from .config import ModelConfig


@dataclass
class Rotation:
    """Cosines and sines fp32 [T, dr/2]."""

    cos: torch.Tensor
    sin: torch.Tensor


pytree.register_dataclass(Rotation)


def frequencies(config: ModelConfig, *, yarn: bool) -> torch.Tensor:
    """fp32 [dr/2] radians per position, on the CPU."""
    dr = config.qk_rope_head_dim
    base = config.compress_rope_theta if yarn else config.rope_theta
    exponent = torch.arange(0, dr, 2, dtype=torch.float32) / dr
    freqs = 1.0 / (base**exponent)
    if not yarn:
        return freqs

    def correction(turns: float) -> float:
        return dr * math.log(config.rope_original_max_position / (2 * math.pi * turns)) / (2 * math.log(base))

    low = max(math.floor(correction(config.rope_beta_fast)), 0)
    high = min(math.ceil(correction(config.rope_beta_slow)), dr - 1)
    ramp = (torch.arange(dr // 2, dtype=torch.float32) - low) / max(high - low, 1e-3)
    ramp = ramp.clamp(0, 1)
    return freqs / config.rope_factor * ramp + freqs * (1 - ramp)


def rotation(positions: torch.Tensor, freqs: torch.Tensor) -> Rotation:
    """Angles fp32(p) * f of positions int64 [T]."""
    angles = positions.float().unsqueeze(1) * freqs
    return Rotation(angles.cos(), angles.sin())


class Rope(nn.Module):
    """`rotate` as a module, so that the many equal rotations of a model are traced once."""

    @property
    def template_kind(self) -> Hashable:
        """Forward reads its arguments only."""
        return ()

    def forward(self, x: torch.Tensor, by: Rotation, inverse: bool = False) -> torch.Tensor:
        """x [T, ..., d], same shape and dtype out."""
        return rotate(x, by, inverse=inverse)


def rotate(x: torch.Tensor, by: Rotation, *, inverse: bool = False) -> torch.Tensor:
    """Rotate the tail of x [T, ..., d] in fp32, round to x's dtype; `inverse` turns back."""
    cos, sin = by.cos, by.sin
    for _ in range(x.dim() - 2):
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    tail = 2 * by.cos.shape[-1]
    head, turned = x[..., :-tail], x[..., -tail:].float()
    a, b = turned[..., 0::2], turned[..., 1::2]
    turn = -sin if inverse else sin
    pair = (a * cos - b * turn, a * turn + b * cos)
    return torch.cat((head, torch.stack(pair, dim=-1).flatten(-2).to(x.dtype)), dim=-1)
