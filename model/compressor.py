"""Pools every `ratio` tokens into one latent: the only thing that later layers keep of a token globally."""

from __future__ import annotations

import torch
from torch import nn

from .config import ModelConfig
from .layers import Linear, RMSNorm
from .numerics import Numerics
from .ops.kv import write
from .step import Rows


class Compressor(nn.Module):
    """Latents before rotation.

    Ratio 1: the normed projection. Ratio 2: non-overlapping pairs (2j, 2j+1), per channel a softmax over the two gate
    scores, in fp32, rounded before the norm. A half-full group waits in a ring of fp32 rows (value, gate).
    """

    def __init__(self, config: ModelConfig, numerics: Numerics, ratio: int, weight_dtype: torch.dtype) -> None:
        super().__init__()
        self.ratio = ratio
        self.wkv = Linear(config.hidden_size, config.head_dim, numerics, weight_dtype)
        if ratio > 1:
            self.wgate = Linear(config.hidden_size, config.head_dim, numerics, weight_dtype)
        self.norm = RMSNorm(config.head_dim, config, numerics)

    def forward(self, h: torch.Tensor, rows: Rows, group: torch.Tensor | None) -> torch.Tensor:
        """h [T, D], group ring [rings, capacity, 2 * dh] to latents [T, dh]; rows that close no group mean nothing."""
        if self.ratio == 1:
            return self.norm(self.wkv(h))
        assert group is not None
        own = torch.cat((self.wkv(h, torch.float32), self.wgate(h, torch.float32)), dim=-1)
        shifted = torch.cat((own[:1], own[:-1]))
        kept = group.flatten(0, 1)[rows.group_before]
        before = torch.where(rows.in_chunk_before.unsqueeze(1), shifted, kept)
        write(group, own, rows.group_slot)
        pair = torch.stack((before, own), dim=1)
        value, gate = pair.chunk(2, dim=-1)
        pooled = (torch.softmax(gate, dim=1) * value).sum(1)
        return self.norm(pooled.to(h.dtype))
