"""Chooses which compressed entries a row attends to, once for several layers."""

from __future__ import annotations

import torch
from torch import nn

from .cache import RecordFormat
from .config import ModelConfig
from .layers import Linear, RMSNorm
from .numerics import Numerics
from .ops.indexer import indexer_logits
from .ops.kv import encode
from .ops.quant import quantize
from .ops.select import keep_blocks, select_blocks, top_rows
from .rope import Rope, Rotation
from .step import Rows


class Indexer(nn.Module):
    """Index queries, head weights, selection; at a KV source also the index keys, made of the unrotated latents."""

    def __init__(
        self,
        config: ModelConfig,
        numerics: Numerics,
        ratio: int,
        candidates: str,
        owns_keys: bool,
        weight_dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.config, self.ratio, self.candidates = config, ratio, candidates
        self.quantiser = "mxfp4" if numerics.kv_quant else "none"
        self.wide = numerics.gemm_accumulate == "float64"
        heads, dim = config.index_n_heads, config.index_head_dim
        self.rope = Rope()
        self.wq_b = Linear(config.q_lora_rank, heads * dim, numerics, weight_dtype)
        self.weights_proj = Linear(config.hidden_size, heads, numerics, weight_dtype)
        if owns_keys:
            self.wk = Linear(config.head_dim, dim, numerics, weight_dtype)
            self.k_norm = RMSNorm(dim, config, numerics)

    def keys(self, latent: torch.Tensor, entry: Rotation, form: RecordFormat) -> torch.Tensor:
        """Index-key records of latents [T, dh], rotated at their group's first position."""
        return encode(self.rope(self.k_norm(self.wk(latent)), entry), form)

    def forward(
        self,
        h: torch.Tensor,
        q_input: torch.Tensor,
        rows: Rows,
        key_pool: torch.Tensor,
        candidates: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """Selected entries int64 [T, index_topk], ascending, -1 last; blocks for later sources to stay in; scores.

        h [T, D] is the layer's normed input, q_input [T, q_lora] the (quantised) query latent, candidates
        [T, candidate_topk_blocks] the block ids of the candidate source where this layer consumes them.
        """
        c = self.config
        heads, dim = c.index_n_heads, c.index_head_dim
        q = self.wq_b(q_input).unflatten(1, (heads, dim))
        q = quantize(self.rope(q, rows.rotation(self.ratio)), self.quantiser)
        w = self.weights_proj(h).float() * (dim**-0.5 * heads**-0.5)
        visible = rows.visible(self.ratio)
        scores = indexer_logits(q, w, key_pool, rows.page_table, rows.request, visible, self.wide)
        if self.candidates == "consume":
            assert candidates is not None
            scores = keep_blocks(scores, candidates, c.candidate_block_size)
        blocks = None
        if self.candidates == "publish":
            blocks = select_blocks(scores, visible, c.candidate_block_size, c.candidate_topk_blocks)
        return top_rows(scores, c.index_topk), blocks, scores
