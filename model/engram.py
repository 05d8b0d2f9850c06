"""The n-gram memory's modules: hashing for all layers at once, one table and injection per Engram layer."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import nn

from .batch import StepBatch
from .config import ModelConfig
from .layers import Linear, quantize_input
from .ngram import ngram_buckets, ngram_multipliers
from .numerics import Numerics
from .ops import engram as ops


class NgramHash(nn.Module):
    """Table rows of every token for all Engram layers, from token ids alone."""

    token_map: torch.Tensor
    multipliers: torch.Tensor
    primes: torch.Tensor
    offsets: torch.Tensor

    def __init__(self, config: ModelConfig, constants: torch.device) -> None:
        super().__init__()
        self.pad, self.image = config.engram_pad_token_id, config.image_token_id
        layers, n = config.engram_layer_ids, config.engram_max_ngram_size
        buckets = ngram_buckets(len(layers), n, config.engram_n_heads, config.engram_vocab_size)
        factors = [ngram_multipliers(i, n, config.engram_compressed_vocab_size) for i in layers]
        self.register_buffer("token_map", torch.empty(config.vocab_size, dtype=torch.int64))
        for name, values in (("multipliers", factors), ("primes", buckets.primes), ("offsets", buckets.offsets)):
            self.register_buffer(name, torch.tensor(values, dtype=torch.int64, device=constants), persistent=False)

    def forward(self, batch: StepBatch) -> torch.Tensor:
        """int64 [T, Engram layers, columns]."""
        return torch.ops.precede.engram_hash(
            batch.token_ids,
            batch.positions,
            batch.request_of_row,
            batch.row_start,
            batch.chunk_start,
            batch.lookback_ids,
            self.token_map,
            self.multipliers,
            self.primes,
            self.offsets,
            self.pad,
            self.image,
        )


class EngramTable(nn.Module):
    """A table of E4M3 rows with UE8M0 scales per 32 columns; far larger than memory when published, so a buffer."""

    weight: torch.Tensor
    scale: torch.Tensor

    def __init__(self, rows: int, dim: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.empty(rows, dim, dtype=torch.float8_e4m3fn), persistent=False)
        self.register_buffer("scale", torch.empty(rows, dim // 32, dtype=torch.uint8), persistent=False)

    def forward(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """int64 [T, columns] to [T, columns * dim]."""
        return torch.ops.precede.engram_gather(self.weight, self.scale, rows, dtype)


class Engram(nn.Module):
    """Looks the rows up, projects them to one key per stream and one value, adds the gated value to every stream."""

    def __init__(self, config: ModelConfig, numerics: Numerics, rows: int, weight_dtype: torch.dtype) -> None:
        super().__init__()
        self.numerics, self.eps = numerics, config.rms_norm_eps
        m, dim = config.hc_mult, config.hidden_size
        self.embed = EngramTable(rows, config.engram_head_dim)
        self.wkv = Linear(config.engram_columns * config.engram_head_dim, (m + 1) * dim, numerics, weight_dtype)
        self.q_weight = nn.Parameter(torch.empty(m, dim, dtype=numerics.dtype))
        self.k_weight = nn.Parameter(torch.empty(m, dim, dtype=numerics.dtype))

    @property
    def template_kind(self) -> Hashable:
        """Everything forward reads besides weights and arguments."""
        return (self.numerics, self.eps)

    def forward(self, streams: torch.Tensor, rows: torch.Tensor, image: torch.Tensor) -> torch.Tensor:
        """streams [T, m, D], rows int64 [T, columns], image bool [T] to streams."""
        entries = self.embed(rows, self.numerics.dtype)
        kv = self.wkv(quantize_input(entries, self.numerics))
        return ops.inject(streams, kv, self.q_weight, self.k_weight, image, self.eps)
