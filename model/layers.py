"""Small parts with weights: an embedding, a product, a norm, the coefficients of one seam."""

from __future__ import annotations

from collections.abc import Hashable

import torch
import torch.nn.functional as F
from torch import nn

from .config import ModelConfig
from .numerics import Numerics
from .ops.coefficients import coefficients
from .ops.linear import linear
from .ops.quant import quantize
from .ops.seam import rms_norm


class Linear(nn.Module):
    """x @ weight.T without bias; weight [out, in] holds exact decoded values."""

    def __init__(self, in_dim: int, out_dim: int, numerics: Numerics, weight_dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_dim, in_dim, dtype=weight_dtype))
        self.wide = numerics.gemm_accumulate == "float64"

    def forward(self, x: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        """x [..., in] to [..., out]."""
        return linear(x, self.weight, out_dtype, self.wide)


class Embedding(nn.Module):
    """Rows of a weight [vocab, dim] by token id."""

    def __init__(self, vocab: int, dim: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab, dim, dtype=dtype))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids int64 [T] to [T, dim]."""
        return F.embedding(ids, self.weight)


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last axis."""

    def __init__(self, dim: int, config: ModelConfig, numerics: Numerics) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim, dtype=numerics.dtype))
        self.eps = config.rms_norm_eps

    @property
    def template_kind(self) -> Hashable:
        """Modules of equal kind and shapes trace to the same graph."""
        return (self.eps,)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., dim], same dtype out."""
        return rms_norm(x, self.weight, self.eps)


class Coefficients(nn.Module):
    """What one seam's product over the streams gives: pre (for the next sub-layer), post and mix (for its own)."""

    def __init__(self, config: ModelConfig, numerics: Numerics) -> None:
        super().__init__()
        m, self.config = config.hc_mult, config
        self.wide = numerics.gemm_accumulate == "float64"
        self.fn = nn.Parameter(torch.empty(m * (m + 2), m * config.hidden_size, dtype=torch.float32))
        self.base = nn.Parameter(torch.empty(m * (m + 2), dtype=torch.float32))
        self.scale = nn.Parameter(torch.empty(3, dtype=torch.float32))

    @property
    def template_kind(self) -> Hashable:
        """Modules of equal kind and shapes trace to the same graph."""
        return (self.config.hc_sinkhorn_iters, self.config.hc_eps, self.config.rms_norm_eps, self.wide)

    def forward(self, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """streams [T, m, D] to pre [T, m], post [T, m], mix [T, m, m], fp32."""
        c = self.config
        return coefficients(
            streams, self.fn, self.base, self.scale, c.hc_sinkhorn_iters, c.hc_eps, c.rms_norm_eps, self.wide
        )


def quantize_input(x: torch.Tensor, numerics: Numerics) -> torch.Tensor:
    """The input of a product whose weight is stored quantised: fp8 blocks of 32 where act_quant is on."""
    return quantize(x, "fp8" if numerics.act_quant else "none")
