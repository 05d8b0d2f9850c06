"""What is kept of a sequence between steps: layouts, their byte arithmetic, and allocation.

Two kinds of store. *Pages* hold the global KV: per KV source one pool of latents and one of index keys, `page_size`
tokens a page, entry `j` of a ratio-r source at token positions `[j*r, (j+1)*r)`. *Rings* hold what only the running
request needs: the sliding window of every layer, and the open group of a ratio-2 compressor. Page 0 and ring 0 belong
to nobody and are never written.

A store keeps either *values* (already quantised and dequantised) or *packed* records; both read back the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch.utils import _pytree as pytree

from .config import ModelConfig
from .errors import BatchError, ConfigError
from .numerics import Numerics

Store = Literal["values", "packed"]
KVFormat = Literal["nvfp4", "fp8", "bf16", "auto"]


@dataclass(frozen=True)
class RecordFormat:
    """How one vector is stored: quantised in blocks or not at all (none); packed to bytes or not."""

    quantiser: Literal["none", "fp8", "nvfp4", "mxfp4"]
    packed: bool
    dtype: torch.dtype  # of the value that is read back

    def width(self, dim: int) -> int:
        """Elements of a stored record of `dim` values: bytes if packed, values otherwise."""
        return packed_bytes(self.quantiser, dim) if self.packed else dim

    @property
    def stored_dtype(self) -> torch.dtype:
        """Element dtype of the store."""
        return torch.uint8 if self.packed else self.dtype


def packed_bytes(quantiser: str, dim: int) -> int:
    """Bytes of one packed record (spec: 528 = 512 + 16 for fp8, 288 = 256 + 32 for nvfp4, 68 = 64 + 4 for mxfp4)."""
    if quantiser == "fp8":
        return dim + dim // 32
    if quantiser == "nvfp4":
        return dim // 2 + dim // 16
    if quantiser == "mxfp4":
        return dim // 2 + dim // 32
    raise ValueError(f"no packed record for quantiser {quantiser!r}")


@dataclass(frozen=True)
class StoreShape:
    """One page or one ring of a store: `rows` records of `width` elements."""

    rows: int
    width: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of one page or one ring."""
        return self.rows * self.width * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class CacheLayout:
    """Shapes and formats of all stores of one model; strides are taken from here only."""

    config: ModelConfig
    numerics: Numerics
    page_size: int
    lookahead: int
    latent: RecordFormat
    window: RecordFormat
    index_key: RecordFormat

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        numerics: Numerics | str,
        *,
        page_size: int = 128,
        store: Store = "values",
        kv_format: KVFormat = "auto",
        lookahead: int = 0,
    ) -> CacheLayout:
        """Choose the formats. `kv_format` is the latents'; "auto" is nvfp4 where kv_quant is on, else plain values.

        Raises ConfigError for a page size that would split a group, or packed stores without quantisation.
        """
        numerics = Numerics.of(numerics)
        ratios = {r for r in config.compress_ratios if r}
        if page_size < 1 or any(page_size % r for r in ratios):
            raise ConfigError(
                f"page_size = {page_size} must be a positive multiple of every compress ratio {sorted(ratios)}"
            )
        if lookahead < 0:
            raise ConfigError(f"lookahead = {lookahead} must not be negative")
        if store not in ("values", "packed"):
            raise ConfigError(f"store = {store!r}; choose values or packed")
        if kv_format not in ("nvfp4", "fp8", "bf16", "auto"):
            raise ConfigError(f"kv_format = {kv_format!r}; choose nvfp4, fp8, bf16 or auto")
        quantised = numerics.kv_quant
        if store == "packed" and not quantised:
            raise ConfigError(f"packed stores hold quantised records; numerics {numerics.describe()} has kv_quant off")
        if not quantised and kv_format in ("nvfp4", "fp8"):
            raise ConfigError(f"kv_format = {kv_format!r} needs kv_quant; numerics {numerics.describe()} has it off")
        if kv_format == "bf16" and numerics.compute != "bfloat16":
            raise ConfigError(f"kv_format = 'bf16', but numerics {numerics.describe()} computes in fp32; use auto")
        latent = {"auto": "nvfp4", "bf16": "none"}.get(kv_format, kv_format) if quantised else "none"
        packed = store == "packed"
        kinds = {
            "latent": latent,
            "window": "fp8" if quantised else "none",
            "index_key": "mxfp4" if quantised else "none",
        }
        formats = {
            name: RecordFormat(quantiser, packed and quantiser != "none", numerics.dtype)  # type: ignore[arg-type]
            for name, quantiser in kinds.items()
        }
        return cls(config=config, numerics=numerics, page_size=page_size, lookahead=lookahead, **formats)

    @property
    def window_capacity(self) -> int:
        """Rows of a window ring: row of position p is p mod capacity."""
        return self.config.sliding_window + self.lookahead

    @property
    def group_capacity(self) -> int:
        """Rows of an open-group ring: a power of two, at least 8 and at least lookahead + 2."""
        return max(8, 1 << (self.lookahead + 1).bit_length())

    @property
    def kv_sources(self) -> tuple[int, ...]:
        """Layers that own a latent pool and an index-key pool, ascending."""
        return self.config.kv_source_layer_ids

    @property
    def group_sources(self) -> tuple[int, ...]:
        """KV sources that need an open-group ring (ratio > 1), ascending."""
        return tuple(s for s in self.kv_sources if self.config.compress_ratios[s] > 1)

    def entries_per_page(self, source: int) -> int:
        """Entries of one page in the pools of KV source `source`."""
        return self.page_size // self.config.compress_ratios[source]

    @cached_property
    def stores(self) -> dict[str, tuple[StoreShape, ...]]:
        """Shape of every store by its place in `Caches`, without the leading dimension (rings or pages)."""
        c = self.config
        window = StoreShape(self.window_capacity, self.window.width(c.head_dim), self.window.stored_dtype)
        group = StoreShape(self.group_capacity, 2 * c.head_dim, torch.float32)

        def pools(form: RecordFormat, dim: int) -> tuple[StoreShape, ...]:
            return tuple(
                StoreShape(self.entries_per_page(s), form.width(dim), form.stored_dtype) for s in self.kv_sources
            )

        return {
            "window": (window,) * c.num_hidden_layers,
            "latent": pools(self.latent, c.head_dim),
            "index_key": pools(self.index_key, c.index_head_dim),
            "group": (group,) * len(self.group_sources),
        }

    def page_bytes(self) -> int:
        """Bytes of one page over all pools: 113,920 for the published config, 128 tokens, packed NVFP4 + MXFP4."""
        return sum(s.nbytes for s in (*self.stores["latent"], *self.stores["index_key"]))

    def bytes_per_token(self) -> float:
        """Global KV of one token: 890 for the published config, packed."""
        return self.page_bytes() / self.page_size

    def ring_bytes(self) -> int:
        """Bytes of one request's rings: windows of all layers and open groups."""
        return sum(s.nbytes for s in (*self.stores["window"], *self.stores["group"]))

    def check(self, caches: Caches) -> None:
        """Raise BatchError for caches that this layout did not make."""
        for name, shapes in self.stores.items():
            found = getattr(caches, name)
            if len(found) != len(shapes):
                raise BatchError(
                    f"caches.{name} holds {len(found)} stores, this layout has {len(shapes)}; "
                    "make them with allocate(model.layout, ...)"
                )
            for i, (t, shape) in enumerate(zip(found, shapes, strict=True)):
                if tuple(t.shape[1:]) != (shape.rows, shape.width) or t.dtype != shape.dtype:
                    raise BatchError(
                        f"caches.{name}[{i}] is {t.dtype} {list(t.shape)}, this layout has {shape.dtype} "
                        f"[*, {shape.rows}, {shape.width}]; make them with allocate(model.layout, ...)"
                    )


@dataclass
class Caches:
    """All stores of a model, a pytree; lists follow `CacheLayout.kv_sources` / `group_sources` / the layer number.

    window[l]      [rings, window_capacity, record]
    latent[i]      [pages, entries_per_page, record]
    index_key[i]   [pages, entries_per_page, record]; packed pages hold all values first, then all scales
    group[i]       [rings, group_capacity, 2 * head_dim] fp32: value then gate of an open group's rows
    """

    window: list[torch.Tensor]
    latent: list[torch.Tensor]
    index_key: list[torch.Tensor]
    group: list[torch.Tensor]

    def nbytes(self) -> int:
        """Bytes held by all stores."""
        return sum(t.numel() * t.element_size() for t in pytree.tree_leaves(self))


pytree.register_dataclass(Caches)


def allocate(layout: CacheLayout, *, pages: int, rings: int, device: torch.device | str = "cpu") -> Caches:
    """Zeroed stores for `pages` pages and `rings` rings, the null page and the null ring included."""
    counts = {"window": rings, "latent": pages, "index_key": pages, "group": rings}
    return Caches(
        **{
            name: [torch.zeros(counts[name], s.rows, s.width, dtype=s.dtype, device=device) for s in shapes]
            for name, shapes in layout.stores.items()
        }
    )
