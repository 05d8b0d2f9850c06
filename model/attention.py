"""One layer's attention: its own window, the selected entries of its KV source, one softmax over both, a sink per head.

`insert` makes what the layer keeps of its rows (window records; at a KV source compressed entries and index keys too),
`attend` is the query side, `keep_window` writes the ring. The three are separate because bounded replay runs the first
on all rows and the second on the kept ones.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torch.utils import _pytree as pytree

from .cache import CacheLayout
from .compressor import Compressor
from .index_loss import index_loss
from .indexer import Indexer
from .layers import Linear, RMSNorm, quantize_input
from .ops.attention import sparse_attention
from .ops.collectives import all_reduce
from .ops.kv import decode, encode, key_values, write
from .ops.linear import group_product
from .ops.registry import training
from .rope import Rope
from .step import Rows

Taps = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Kind:
    """What a layer's forward depends on besides its weights: layers of equal kind trace to the same graph.

    role: window only; full = owns compressed KV and an index; reindex = owns an index over another layer's keys;
    reuse = takes another layer's selection. late: after the last KV source.
    """

    role: Literal["window", "full", "reindex", "reuse"]
    ratio: int
    candidates: Literal["none", "publish", "consume"]
    engram: bool
    late: bool


@dataclass
class LayerStore:
    """The stores that one layer touches; a reuse or reindex layer's latent and index_key are its source's."""

    window: torch.Tensor
    latent: torch.Tensor | None = None
    index_key: torch.Tensor | None = None
    group: torch.Tensor | None = None


@dataclass
class Selection:
    """What index sources hand down: entries [T, index_topk] and candidate blocks [T, candidate_topk_blocks]."""

    entries: torch.Tensor | None = None
    blocks: torch.Tensor | None = None


pytree.register_dataclass(LayerStore)
pytree.register_dataclass(Selection)


class Attention(nn.Module):
    """Query latent, heads, window latent, compressor and indexer where the kind has them, grouped output products."""

    def __init__(self, layout: CacheLayout, kind: Kind, weight_dtype: torch.dtype, world: int = 1) -> None:
        super().__init__()
        c, n = layout.config, layout.numerics
        self.layout, self.kind, self.world = layout, kind, world
        self.wide = n.gemm_accumulate == "float64"
        heads, dh = c.num_attention_heads, c.head_dim
        self.wq_a = Linear(c.hidden_size, c.q_lora_rank, n, weight_dtype)
        self.q_norm = RMSNorm(c.q_lora_rank, c, n)
        self.wq_b = Linear(c.q_lora_rank, heads * dh, n, weight_dtype)
        self.wkv = Linear(c.hidden_size, dh, n, weight_dtype)
        self.kv_norm = RMSNorm(dh, c, n)
        self.attn_sink = nn.Parameter(torch.empty(heads, dtype=torch.float32))
        self.wo_a = Linear(heads * dh // c.o_groups, c.o_groups * c.o_lora_rank, n, weight_dtype)
        self.wo_b = Linear(c.o_groups * c.o_lora_rank, c.hidden_size, n, weight_dtype)
        self.rope = Rope()
        if kind.role == "full":
            self.compressor = Compressor(c, n, kind.ratio, weight_dtype)
        if kind.role in ("full", "reindex"):
            self.indexer = Indexer(c, n, kind.ratio, kind.candidates, kind.role == "full", weight_dtype)

    @property
    def template_kind(self) -> Hashable:
        """Everything forward reads besides weights and arguments; Engram and the cut do not matter here."""
        return (self.kind.role, self.kind.ratio, self.kind.candidates, self.layout, self.world)

    def forward(
        self, h: torch.Tensor, rows: Rows, store: LayerStore, selection: Selection, taps: Taps | None = None
    ) -> tuple[torch.Tensor, Selection]:
        """h [T, D], the folded and normed input, to [T, D] and what the layer hands down."""
        hq = quantize_input(h, self.layout.numerics)
        window = self.insert(h, hq, rows, store)
        y, selection = self.attend(h, hq, window, rows, store, selection, taps)
        self.keep_window(window, rows, store)
        return y, selection

    def insert(self, h: torch.Tensor, hq: torch.Tensor, rows: Rows, store: LayerStore) -> torch.Tensor:
        """Window records [T, record] of the rows; a KV source also writes the entries and keys that they complete."""
        ratio = self.kind.ratio
        latent = self.rope(self.kv_norm(self.wkv(hq)), rows.rotation(ratio))
        window = encode(latent, self.layout.window)
        if self.kind.role == "full":
            assert store.latent is not None
            assert store.index_key is not None
            latent, entry = self.compressor(h, rows, store.group), rows.entry[ratio]
            slots, form = rows.entry_slot(ratio), self.layout.index_key
            keys = self.indexer.keys(latent, entry, form)
            store.index_key = write(store.index_key, keys, slots, key_values(form, self.layout.config.index_head_dim))
            store.latent = write(store.latent, encode(self.rope(latent, entry), self.layout.latent), slots)
        return window

    def keep_window(self, window: torch.Tensor, rows: Rows, store: LayerStore) -> None:
        """Write the last rows' records into the ring; after the reads of `attend`."""
        store.window = write(store.window, window, rows.ring_slot)

    def attend(
        self,
        h: torch.Tensor,
        hq: torch.Tensor,
        window: torch.Tensor,
        rows: Rows,
        store: LayerStore,
        selection: Selection,
        taps: Taps | None = None,
    ) -> tuple[torch.Tensor, Selection]:
        """Queries of the rows over window records (which may be of more rows) and selected entries."""
        c, n, kind = self.layout.config, self.layout.numerics, self.kind
        qr = quantize_input(self.q_norm(self.wq_a(hq)), n)
        q = self.wq_b(qr).unflatten(1, (c.num_attention_heads, c.head_dim))
        rotation = rows.rotation(kind.ratio)
        q = self.rope(q, rotation)
        if kind.role in ("full", "reindex"):
            assert store.index_key is not None
            entries, blocks, scores = self.indexer(h, qr, rows, store.index_key, selection.blocks)
            selection = Selection(entries, selection.blocks if blocks is None else blocks)
            if taps is not None:
                self._tap_index(taps, q, entries, blocks, scores, rows, store)

        keys, valid = self._window_keys(window, rows, store), rows.window_valid
        if kind.role != "window":
            taken, present = self._entry_keys(selection, rows, store)
            keys, valid = torch.cat((keys, taken), dim=1), torch.cat((valid, present), dim=1)
        o = sparse_attention(q, keys, valid, self.attn_sink, c.head_dim**-0.5, self.wide)
        o = self.rope(o, rotation, inverse=True).flatten(1).unflatten(1, (c.o_groups, -1))
        z = group_product(o, self.wo_a.weight.unflatten(0, (c.o_groups, -1)), self.wide).flatten(1)
        return all_reduce(self.wo_b(quantize_input(z, n)), "tp", self.world), selection

    def _tap_index(
        self,
        taps: Taps,
        q: torch.Tensor,
        entries: torch.Tensor,
        blocks: torch.Tensor | None,
        scores: torch.Tensor,
        rows: Rows,
        store: LayerStore,
    ) -> None:
        taps["selected"], taps["index_scores"] = entries, scores
        if blocks is not None:
            taps["candidates"] = blocks
        if training(scores):
            assert store.latent is not None
            taps["index_loss"] = index_loss(scores, q, store.latent, self.layout.latent, rows)

    def _window_keys(self, window: torch.Tensor, rows: Rows, store: LayerStore) -> torch.Tensor:
        records = torch.where(
            rows.window_in_chunk.unsqueeze(-1),
            window[rows.window_row],
            store.window.flatten(0, 1)[rows.window_ring],
        )
        records = torch.where(rows.window_valid.unsqueeze(-1), records, 0)
        return decode(records, self.layout.window)

    def _entry_keys(self, selection: Selection, rows: Rows, store: LayerStore) -> tuple[torch.Tensor, torch.Tensor]:
        entries = selection.entries
        assert entries is not None
        assert store.latent is not None
        per_page = store.latent.shape[1]
        present = (entries >= 0) & rows.valid.unsqueeze(1)
        at = torch.where(present, entries, 0)
        page = rows.page_table[rows.request.unsqueeze(1), torch.div(at, per_page, rounding_mode="floor")]
        records = store.latent.flatten(0, 1)[page * per_page + at % per_page]
        return decode(torch.where(present.unsqueeze(-1), records, 0), self.layout.latent), present
