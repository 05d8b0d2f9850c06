"""One layer: Engram where it has one, attention, experts, each wrapped in a seam of the hyper-connection.

Coefficients are delayed: a seam's product over the streams gives post and mix for its own sub-layer and the folding
weights `pre` for the next one, so nothing inside a sub-layer waits for its own coefficients.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import nn

from .attention import Attention, Kind, LayerStore, Selection, Taps
from .cache import CacheLayout
from .engram import Engram
from .layers import Coefficients, RMSNorm
from .moe import MoE
from .ops.seam import fold, unfold
from .step import Rows


class Block(nn.Module):
    """Streams [T, m, D] and folding weights [T, m] in and out."""

    def __init__(
        self, layout: CacheLayout, kind: Kind, engram_rows: int, weight_dtype: torch.dtype, world: int = 1
    ) -> None:
        super().__init__()
        c, n = layout.config, layout.numerics
        self.kind, self.layout, self.world = kind, layout, world
        if kind.engram:
            self.engram = Engram(c, n, engram_rows, weight_dtype)
        self.hc_attn = Coefficients(c, n)
        self.hc_ffn = Coefficients(c, n)
        self.attn_norm = RMSNorm(c.hidden_size, c, n)
        self.ffn_norm = RMSNorm(c.hidden_size, c, n)
        self.attn = Attention(layout, kind, weight_dtype, world)
        self.ffn = MoE(c, n, weight_dtype, world)

    @property
    def template_kind(self) -> Hashable:
        """Everything forward reads besides weights and arguments."""
        return (self.kind, self.layout, self.world)

    def forward(
        self,
        streams: torch.Tensor,
        pre: torch.Tensor,
        rows: Rows,
        store: LayerStore,
        selection: Selection,
        engram_rows: torch.Tensor | None = None,
        taps: Taps | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, Selection]:
        """streams, the folding weights made by the layer before, and what it hands down; returns the same three."""
        streams = self.enter(streams, rows, engram_rows)
        h = self.attn_norm(fold(streams, pre))
        pre, post, mix = self.hc_attn(streams)
        y, selection = self.attn(h, rows, store, selection, taps)
        streams, pre = self.finish(y, streams, pre, post, mix, rows, taps)
        return streams, pre, selection

    def enter(self, streams: torch.Tensor, rows: Rows, engram_rows: torch.Tensor | None) -> torch.Tensor:
        """Inject the n-gram memory, before the coefficients see the streams."""
        if not self.kind.engram:
            return streams
        assert engram_rows is not None
        return self.engram(streams, engram_rows, rows.image)

    def finish(
        self,
        y: torch.Tensor,
        streams: torch.Tensor,
        pre: torch.Tensor,
        post: torch.Tensor,
        mix: torch.Tensor,
        rows: Rows,
        taps: Taps | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """From the attention's output to the end of the layer: unfold, experts, unfold."""
        if taps is not None:
            taps["streams_in"], taps["attn_out"] = streams, y
        streams = unfold(y, streams, post, mix)
        h = self.ffn_norm(fold(streams, pre))
        pre, post, mix = self.hc_ffn(streams)
        y = self.ffn(h, rows, taps)
        if taps is not None:
            taps["ffn_out"], taps["streams_mid"] = y, streams
        return unfold(y, streams, post, mix), pre
