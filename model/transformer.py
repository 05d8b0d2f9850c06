"""DeepSeek-V4.1-Flash, text backbone: a causal encoder-decoder of one stack.

- Four residual streams per token, mixed by hyper-connections whose folding weights come one sub-layer early.
- Attention over a sliding window of the layer's own plus a few hundred compressed entries shared by many layers. A KV
  source writes the entries; index sources choose among them; the others reuse both.
- Layers up to the last KV source, the *cut*, are the encoder half: they own all global KV. Layers after it keep only
  their window, so a prefill needs them for the last rows alone (`replay`).
- Mixture of experts in every layer; two layers add an n-gram memory read from tables in host memory.

`forward` runs every layer on every row. `replay` is the written-out reference of the cut.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn
from torch.utils import _pytree as pytree

from .attention import Kind, LayerStore, Selection, Taps
from .batch import StepBatch
from .block import Block
from .cache import CacheLayout, Caches
from .config import ModelConfig
from .engram import NgramHash
from .errors import BatchError, ConfigError
from .layers import Embedding, Linear, RMSNorm, quantize_input
from .numerics import Numerics
from .ops.rows import trim_rows
from .ops.seam import fold
from .rope import frequencies
from .step import Rows, derive_rows, early_windows, late_windows


def layer_kind(config: ModelConfig, layer: int) -> Kind:
    """The kind of layer `layer`, from the config alone."""
    ratio = config.compress_ratios[layer]
    role: Literal["window", "full", "reindex", "reuse"] = "reuse"
    if ratio == 0:
        role = "window"
    elif layer in config.kv_source_layer_ids:
        role = "full"
    elif layer in config.index_source_layer_ids:
        role = "reindex"
    candidates: Literal["none", "publish", "consume"] = "none"
    source = config.candidate_source_layer_id
    if source >= 0 and layer == source:
        candidates = "publish"
    elif 0 <= source < layer and role in ("full", "reindex"):
        candidates = "consume"
    return Kind(role, ratio, candidates, layer in config.engram_layer_ids, layer > config.cut)


class Transformer(nn.Module):
    """The whole network.

    Weights of products are fp32 on a CPU, where they are multiplied in fp32, and in the compute dtype on a GPU; both
    hold the exact decoded values. Built uninitialised except for constants, which are real even on the meta device;
    `precede.model.checkpoint` fills the rest.

    layout         stores that forward reads and writes; default: pages of 128 tokens, values
    weight_dtype   dtype of the matrices of products
    world          ranks of a tensor-parallel group; above 1 the output products are summed over it, and whoever fills
                   the weights gives each rank its share
    """

    plain_frequencies: torch.Tensor
    yarn_frequencies: torch.Tensor

    def __init__(
        self,
        config: ModelConfig,
        numerics: Numerics | str,
        *,
        layout: CacheLayout | None = None,
        device: torch.device | str = "cpu",
        weight_dtype: torch.dtype | None = None,
        world: int = 1,
    ) -> None:
        super().__init__()
        numerics = Numerics.of(numerics)
        self.config, self.numerics = config, numerics
        self.layout = layout or CacheLayout.of(config, numerics)
        device = torch.device(device)
        if weight_dtype is None:
            weight_dtype = numerics.dtype if device.type == "cuda" else torch.float32
        constants = torch.device("cpu") if device.type == "meta" else device
        with torch.device(device):
            self.embed = Embedding(config.vocab_size, config.hidden_size, numerics.dtype)
            if config.engram_layer_ids:
                self.ngram = NgramHash(config, constants)
            rows = dict(zip(config.engram_layer_ids, config.engram_num_embeddings, strict=True))
            self.layers = nn.ModuleList(
                Block(self.layout, layer_kind(config, i), rows.get(i, 0), weight_dtype, world)
                for i in range(config.num_hidden_layers)
            )
            self.norm = RMSNorm(config.hidden_size, config, numerics)
            self.head = Linear(config.hidden_size, config.vocab_size, numerics, weight_dtype)
        for name, yarn in (("plain_frequencies", False), ("yarn_frequencies", True)):
            self.register_buffer(name, frequencies(config, yarn=yarn).to(constants), persistent=False)

    def forward(self, batch: StepBatch, caches: Caches, taps: dict[str, Any] | None = None) -> torch.Tensor:
        """Logits fp32 [L, vocab] of the batch's logit rows; all caches written in place.

        While training (gradients on, a parameter that wants one) the caller's caches stay as they are. Every layer runs
        on every row; raises BatchError for a batch that keeps fewer, or caches of another layout.

        `taps`, if given, is filled with intermediate values per layer: `layers.i.` and streams_in (after the n-gram
        memory), attn_out, streams_mid, ffn_out, streams_out, pre, router_ids, router_weights; engram_rows where there
        is a memory; selected, index_scores and candidates at index sources, and index_loss there while training.
        """
        if type(batch.kept_rows) is torch.Tensor and not torch.compiler.is_compiling():
            batch.require_untrimmed()
        early = self.rows(batch)
        late = self.rows(batch, late=True)
        streams, pre, stores = self.start(batch, caches)
        memory = self.memory(batch)
        handed = Selection()
        for i, block in enumerate(self._blocks()):
            rows = late if block.kind.late else early
            own: Taps | None = None if taps is None else {}
            streams, pre, handed = self._layer(i, streams, pre, rows, stores, handed, memory, own)
            _record(taps, i, own, memory.get(i), streams, pre)
        return self.finish(streams, pre, batch.logit_rows)

    def replay(
        self,
        batch: StepBatch,
        caches: Caches,
        taps: dict[str, Any] | None = None,
        *,
        late_start: Literal["cut", "cut+1"] = "cut",
    ) -> torch.Tensor:
        """Bounded replay: layers after the cut run on the kept rows only, with windows clipped at their own floor.

        The cut layer writes its KV for all rows. With `late_start="cut"` its query side runs on the kept rows, with
        "cut+1" on all of them; both give the same result up to the order of sums.
        """
        cut, kept = self.config.cut, batch.kept_rows
        if late_start not in ("cut", "cut+1"):
            raise BatchError(f"late_start = {late_start!r}; choose cut or cut+1")
        if any(layer > cut for layer in self.config.engram_layer_ids):
            raise BatchError(
                f"engram_layer_ids {list(self.config.engram_layer_ids)} reach past the cut at layer {cut}; "
                "such a model has no bounded replay, run forward"
            )
        early = self.rows(batch)
        late = self.rows(batch, late=True, kept=kept)
        streams, pre, stores = self.start(batch, caches)
        memory = self.memory(batch)
        handed = Selection()
        whole = cut + 1 if late_start == "cut+1" else cut
        for i in range(whole):
            own: Taps | None = None if taps is None else {}
            streams, pre, handed = self._layer(i, streams, pre, early, stores, handed, memory, own)
            _record(taps, i, own, memory.get(i), streams, pre)

        if late_start == "cut":
            block = self._blocks()[cut]
            own = None if taps is None else {}
            streams = block.enter(streams, early, memory.get(cut))
            h = block.attn_norm(fold(streams, pre))
            store = stores[cut]
            window = block.attn.insert(h, quantize_input(h, self.numerics), early, store)
            streams, h = trim_rows(streams, kept), trim_rows(h, kept)
            at_cut = self.rows(batch, kept=kept)
            pre, post, mix = block.hc_attn(streams)
            y, handed = block.attn.attend(h, quantize_input(h, self.numerics), window, at_cut, store, handed, own)
            block.attn.keep_window(window, early, store)
            streams, pre = block.finish(y, streams, pre, post, mix, at_cut, own)
            _record(taps, cut, own, None, streams, pre)
        else:
            streams, pre = trim_rows(streams, kept), trim_rows(pre, kept)
            handed = Selection(*(None if t is None else trim_rows(t, kept) for t in (handed.entries, handed.blocks)))

        for i in range(cut + 1, self.config.num_hidden_layers):
            own = None if taps is None else {}
            streams, pre, handed = self._layer(i, streams, pre, late, stores, handed, memory, own)
            _record(taps, i, own, None, streams, pre)
        return self.finish(streams, pre, batch.logit_rows)

    def set_layout(self, layout: CacheLayout) -> None:
        """Read and write stores of another page size or format from now on.

        Raises ConfigError for a layout of another config or other numerics.
        """
        if (layout.config, layout.numerics) != (self.config, self.numerics):
            raise ConfigError(
                f"the layout is for {layout.numerics.describe()} of {layout.config.num_hidden_layers} layers, this "
                f"model computes in {self.numerics.describe()} in {self.config.num_hidden_layers}; "
                "make it with CacheLayout.of(model.config, model.numerics, ...)"
            )
        self.layout = layout
        for block in self._blocks():
            block.layout = block.attn.layout = layout

    def rows(self, batch: StepBatch, *, late: bool = False, kept: torch.Tensor | None = None) -> Rows:
        """Row facts for the layers up to the cut, or for those after it."""
        source = late_windows(batch) if late else early_windows(batch)
        return derive_rows(batch, self.layout, source, (self.plain_frequencies, self.yarn_frequencies), kept)

    def start(self, batch: StepBatch, caches: Caches) -> tuple[torch.Tensor, torch.Tensor, list[LayerStore]]:
        """Streams [T, m, D], all equal to the embedding; folding weights that take the first; stores by layer."""
        embedded = self.embed(batch.token_ids)
        streams = embedded.unsqueeze(1).repeat(1, self.config.hc_mult, 1)
        first = torch.arange(self.config.hc_mult, device=embedded.device) == 0
        pre = first.to(torch.float32).expand(embedded.shape[0], -1)
        return streams, pre, self._stores(caches)

    def memory(self, batch: StepBatch) -> dict[int, torch.Tensor]:
        """Engram table rows [T, columns] by layer."""
        ids = self.config.engram_layer_ids
        if not ids:
            return {}
        rows = self.ngram(batch)
        return {layer: rows[:, j] for j, layer in enumerate(ids)}

    def finish(self, streams: torch.Tensor, pre: torch.Tensor, logit_rows: torch.Tensor) -> torch.Tensor:
        """Fold the wanted rows with the last folding weights, norm, project: fp32 [L, vocab]."""
        h = self.norm(fold(streams[logit_rows], pre[logit_rows]))
        return self.head(h, torch.float32)

    def _layer(
        self,
        i: int,
        streams: torch.Tensor,
        pre: torch.Tensor,
        rows: Rows,
        stores: list[LayerStore],
        handed: Selection,
        memory: dict[int, torch.Tensor],
        taps: Taps | None,
    ) -> tuple[torch.Tensor, torch.Tensor, Selection]:
        block, store = self._blocks()[i], stores[i]
        kind = block.kind
        if kind.role in ("reindex", "reuse"):
            source = stores[self.config.kv_source(i)]
            store.latent = source.latent
            store.index_key = source.index_key if kind.role == "reindex" else None
        given = Selection(
            handed.entries if kind.role == "reuse" else None, handed.blocks if kind.candidates == "consume" else None
        )
        streams, pre, made = block(streams, pre, rows, store, given, memory.get(i), taps)
        if kind.role in ("full", "reindex"):
            handed = Selection(made.entries, made.blocks if kind.candidates == "publish" else handed.blocks)
        return streams, pre, handed

    def _blocks(self) -> list[Block]:
        return list(self.layers)  # type: ignore[arg-type]

    def _stores(self, caches: Caches) -> list[LayerStore]:
        self.layout.check(caches)
        if torch.is_grad_enabled() and any(p.requires_grad for p in self.parameters()):
            caches = pytree.tree_map(torch.clone, caches)
        sources, groups = self.layout.kv_sources, self.layout.group_sources
        stores = [LayerStore(window) for window in caches.window]
        for j, layer in enumerate(sources):
            stores[layer].latent, stores[layer].index_key = caches.latent[j], caches.index_key[j]
        for j, layer in enumerate(groups):
            stores[layer].group = caches.group[j]
        return stores


def _record(
    taps: dict[str, Any] | None,
    layer: int,
    own: Taps | None,
    memory: torch.Tensor | None,
    streams: torch.Tensor,
    pre: torch.Tensor,
) -> None:
    if taps is None or own is None:
        return
    own["streams_out"], own["pre"] = streams, pre
    if memory is not None:
        own["engram_rows"] = memory
    taps.update({f"layers.{layer}.{name}": value for name, value in own.items()})
