"""The published tensor table: every name in a checkpoint with its shape, stored dtype and place in the model.

A table is made of rows (`layers.{l}.ffn.experts.{e}.w1.weight` stands for thousands of tensors), so that it can be
printed, counted and summed without allocating; `tensor_table` expands the rows into one entry a tensor. Four kinds of
storage: plain BF16/F32, dense FP8 with one scale a 32x32 tile, packed FP4 experts with one scale a row and 32
columns, Engram tables in FP8 with one scale a row and 32 columns. The scale of `X.weight` is `X.scale`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Literal

from .config import ModelConfig
from .errors import ConfigError

Kind = Literal["plain", "fp8", "fp4", "table"]
Section = Literal["backbone", "draft", "vision"]

BLOCK = 32  # elements that share one scale, along each blocked axis

DTYPE_BYTES = {"F32": 4, "BF16": 2, "F8_E4M3": 1, "F8_E8M0": 1, "I8": 1}

# What a released checkpoint holds besides the text backbone; read over, never loaded.
SKIPPED_PREFIXES = ("mtp.", "vision.", "aligner.", "image_start", "image_end", "image_newline")


@dataclass(frozen=True, kw_only=True)
class TableRow:
    """All tensors that differ only in layer `{l}` and expert `{e}`."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # as safetensors spells it
    kind: Kind = "plain"
    section: Section = "backbone"
    layers: tuple[int, ...] = ()
    experts: int = 0
    meaning: str = ""

    @property
    def count(self) -> int:
        """Number of tensors."""
        return max(1, len(self.layers)) * max(1, self.experts)

    @property
    def tensor_bytes(self) -> int:
        """Stored bytes of one tensor."""
        return prod(self.shape) * DTYPE_BYTES[self.dtype]

    @property
    def total_bytes(self) -> int:
        """Stored bytes of all tensors of the row."""
        return self.count * self.tensor_bytes

    @property
    def parameters(self) -> int:
        """Values that the row's tensors hold: two a byte for packed FP4, none for a scale of another tensor."""
        if self.dtype == "F8_E8M0":
            return 0
        return self.count * prod(self.shape) * (2 if self.dtype == "I8" else 1)

    @property
    def layers_text(self) -> str:
        """The layers as people write them: `0-39`, `2,8,14,20`, or `-` for none."""
        runs: list[list[int]] = []
        for layer in self.layers:
            if runs and layer == runs[-1][-1] + 1:
                runs[-1].append(layer)
            else:
                runs.append([layer])
        parts = [f"{r[0]}-{r[-1]}" if len(r) > 2 else ",".join(map(str, r)) for r in runs]
        return ",".join(parts) or "-"


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """One tensor of a checkpoint; `target` is the parameter or buffer of the model it ends in, None if skipped."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    kind: Kind
    section: Section
    target: str | None
    expert: int | None

    @property
    def nbytes(self) -> int:
        """Stored bytes."""
        return prod(self.shape) * DTYPE_BYTES[self.dtype]

    @property
    def is_scale(self) -> bool:
        """Whether this holds the block scales of another tensor."""
        return self.dtype == "F8_E8M0"

    @property
    def scale_name(self) -> str | None:
        """Name of the tensor that holds this one's scales; None if it has none."""
        if self.dtype not in ("F8_E4M3", "I8"):
            return None
        return self.name.removesuffix("weight") + "scale"

    @property
    def value_shape(self) -> tuple[int, ...]:
        """Shape once decoded: packed FP4 has twice the stored columns."""
        return (*self.shape[:-1], 2 * self.shape[-1]) if self.dtype == "I8" else self.shape


def table_rows(config: ModelConfig, *, plain: bool = False) -> list[TableRow]:
    """Rows of the text backbone in forward order.

    `plain` describes the multiplied-out form of a checkpoint: every scaled weight stored BF16, no scales.
    """
    c, D, every = config, config.hidden_size, tuple(range(config.num_hidden_layers))
    kv, index = c.kv_source_layer_ids, c.index_source_layer_ids
    ratio2 = tuple(s for s in kv if c.compress_ratios[s] == 2)
    rows = [TableRow(name="embed.weight", shape=(c.vocab_size, D), dtype="BF16", meaning="embedding")]
    for layer, num in zip(c.engram_layer_ids, c.engram_num_embeddings, strict=True):
        rows += _scaled("engram.embed", (num, c.engram_head_dim), (layer,), "table", "n-gram table")
    rows += _scaled(
        "engram.wkv",
        ((c.hc_mult + 1) * D, c.engram_columns * c.engram_head_dim),
        c.engram_layer_ids,
        "fp8",
        f"{c.hc_mult} keys, then one value",
    )
    rows.append(_layer("engram.q_weight", (c.hc_mult, D), c.engram_layer_ids))
    rows.append(_layer("engram.k_weight", (c.hc_mult, D), c.engram_layer_ids))
    rows += _block_rows(c, every, c.n_routed_experts)
    rows += [
        _layer("attn.compressor.wkv.weight", (c.head_dim, D), kv, "compressed KV latent"),
        _layer("attn.compressor.wgate.weight", (c.head_dim, D), ratio2, "pooling gate, ratio 2 only"),
        _layer("attn.compressor.norm.weight", (c.head_dim,), kv),
        _layer("attn.indexer.wk.weight", (c.index_head_dim, c.head_dim), kv, "latent to index key"),
        _layer("attn.indexer.k_norm.weight", (c.index_head_dim,), kv),
        *_scaled("attn.indexer.wq_b", (c.index_n_heads * c.index_head_dim, c.q_lora_rank), index, "fp8", "index query"),
        _layer("attn.indexer.weights_proj.weight", (c.index_n_heads, D), index, "head weights"),
        TableRow(name="norm.weight", shape=(D,), dtype="BF16", meaning="final norm"),
        TableRow(name="head.weight", shape=(c.vocab_size, D), dtype="BF16", meaning="output head"),
    ]
    rows = [r for r in rows if r.layers or "{l}" not in r.name]
    return [m for r in rows if (m := _multiplied_out(r)) is not None] if plain else rows


def skipped_rows(config: ModelConfig, data: Mapping[str, Any]) -> list[TableRow]:
    """Rows of the draft layers and the vision tower, whose sizes only the published JSON `data` knows.

    Empty for a config without them. Raises ConfigError for one that announces them but lacks their sizes.
    """
    text, vision = data.get("text_config", data), data.get("vision_config", {})
    rows: list[TableRow] = []
    if config.num_nextn_predict_layers:
        rows += _draft_rows(config, text)
    if vision.get("num_hidden_layers"):
        rows += _vision_rows(config, vision)
    return rows


def tensor_table(
    config: ModelConfig, *, plain: bool = False, data: Mapping[str, Any] | None = None
) -> dict[str, TensorSpec]:
    """Name -> TensorSpec of every tensor, layer by layer; allocates no tensor.

    With `data` (the parsed config.json) the skipped draft and vision tensors are included, with `target` None.
    """
    rows = table_rows(config, plain=plain) + (skipped_rows(config, data) if data is not None else [])
    return {spec.name: spec for spec in expand(rows)}


def expand(rows: Iterable[TableRow]) -> Iterator[TensorSpec]:
    """The tensors that `rows` stand for: without a layer first, then layer by layer, the head last."""
    rows = list(rows)
    for section in dict.fromkeys(r.section for r in rows):
        part = [r for r in rows if r.section == section]
        deepest = max((max(r.layers) for r in part if r.layers), default=-1)
        tail = [r for r in part if r.name in ("norm.weight", "head.weight")]
        yield from (s for r in part if not r.layers and r not in tail for s in _specs(r, None))
        for layer in range(deepest + 1):
            yield from (s for r in part if layer in r.layers for s in _specs(r, layer))
        yield from (s for r in tail for s in _specs(r, None))


def totals(rows: Iterable[TableRow]) -> dict[str, tuple[int, int, int]]:
    """(tensors, bytes, parameters) of each section that occurs, and of everything under the key `total`."""
    sums: dict[str, tuple[int, int, int]] = {}
    for r in rows:
        for key in (r.section, "total"):
            n, size, values = sums.get(key, (0, 0, 0))
            sums[key] = (n + r.count, size + r.total_bytes, values + r.parameters)
    return {k: sums[k] for k in ("backbone", "draft", "vision", "total") if k in sums}


def _layer(
    name: str, shape: tuple[int, ...], layers: tuple[int, ...], meaning: str = "", dtype: str = "BF16"
) -> TableRow:
    return TableRow(name=f"layers.{{l}}.{name}", shape=shape, dtype=dtype, layers=layers, meaning=meaning)


def _scaled(
    name: str, shape: tuple[int, int], layers: tuple[int, ...], kind: Kind, meaning: str, experts: int = 0
) -> list[TableRow]:
    """The weight row and the scale row of a quantised matrix of `shape` values."""
    out, columns = shape
    weight = replace(_layer(f"{name}.weight", shape, layers, meaning, "F8_E4M3"), kind=kind, experts=experts)
    if kind == "fp4":
        weight = replace(weight, shape=(out, columns // 2), dtype="I8")
    tiles = (-(-out // BLOCK) if kind == "fp8" else out, -(-columns // BLOCK))
    name = f"layers.{{l}}.{name}.scale"
    return [weight, replace(weight, name=name, shape=tiles, dtype="F8_E8M0", meaning="block scales")]


def _block_rows(c: ModelConfig, layers: tuple[int, ...], num_experts: int) -> list[TableRow]:
    """What every layer has, draft layers too: coefficients, norms, window attention, experts."""
    D, M, G = c.hidden_size, c.hc_mult, c.o_groups
    Q, out_rank = c.num_attention_heads * c.head_dim, c.o_lora_rank
    rows: list[TableRow] = []
    for side in ("attn", "ffn"):
        rows += [
            _layer(f"hc_{side}_fn", ((2 + M) * M, M * D), layers, "stream coefficients", "F32"),
            _layer(f"hc_{side}_base", ((2 + M) * M,), layers, "pre, post, comb", "F32"),
            _layer(f"hc_{side}_scale", (3,), layers, "pre, post, comb", "F32"),
        ]
    rows += [
        _layer("attn_norm.weight", (D,), layers),
        _layer("attn.attn_sink", (c.num_attention_heads,), layers, "sink logit per head", "F32"),
        *_scaled("attn.wq_a", (c.q_lora_rank, D), layers, "fp8", "query down"),
        _layer("attn.q_norm.weight", (c.q_lora_rank,), layers),
        *_scaled("attn.wq_b", (Q, c.q_lora_rank), layers, "fp8", "query up, head-major"),
        *_scaled("attn.wkv", (c.head_dim, D), layers, "fp8", "window KV latent"),
        _layer("attn.kv_norm.weight", (c.head_dim,), layers),
        *_scaled("attn.wo_a", (G * out_rank, Q // G), layers, "fp8", "grouped output down"),
        *_scaled("attn.wo_b", (D, G * out_rank), layers, "fp8", "output up"),
        _layer("ffn_norm.weight", (D,), layers),
        _layer("ffn.gate.weight", (num_experts, D), layers, "router"),
        _layer("ffn.gate.bias", (num_experts,), layers, "selection bias, text", "F32"),
        _layer("ffn.gate.bias_vl", (num_experts,), layers, "selection bias, image", "F32"),
    ]
    I = c.moe_intermediate_size  # noqa: E741
    for w, shape, meaning in (("w1", (I, D), "gate"), ("w3", (I, D), "up"), ("w2", (D, I), "down")):
        rows += _scaled(f"ffn.shared_experts.{w}", shape, layers, "fp8", f"shared expert {meaning}")
    for w, shape, meaning in (("w1", (I, D), "gate"), ("w3", (I, D), "up"), ("w2", (D, I), "down")):
        rows += _scaled(f"ffn.experts.{{e}}.{w}", shape, layers, "fp4", f"expert {meaning}", num_experts)
    return rows


def _draft_rows(c: ModelConfig, text: Mapping[str, Any]) -> list[TableRow]:
    try:
        rank, experts = int(text["dspark_markov_rank"]), int(text["dspark_n_routed_experts"])
        read_layers = len(text["dspark_target_layer_ids"])
    except KeyError as error:
        raise ConfigError(
            f"num_nextn_predict_layers is {c.num_nextn_predict_layers}, but {error.args[0]} is missing"
        ) from None
    D, last = c.hidden_size, c.num_nextn_predict_layers - 1
    stages = _block_rows(c, tuple(range(c.num_nextn_predict_layers)), experts)
    stages += [
        *_scaled("main_proj", (D, read_layers * D), (0,), "fp8", "reads the target layers"),
        _layer("main_norm.weight", (D,), (0,)),
        _layer("norm.weight", (D,), (last,)),
        _layer("markov_head.embed.weight", (c.vocab_size, rank), (last,)),
        _layer("markov_head.head.weight", (c.vocab_size, rank), (last,)),
        _layer("confidence_head.proj.weight", (1, D + rank), (last,)),
    ]
    return [replace(r, name=r.name.replace("layers.", "mtp.", 1), section="draft") for r in stages]


def _vision_rows(c: ModelConfig, vision: Mapping[str, Any]) -> list[TableRow]:
    try:
        width, mlp = int(vision["hidden_size"]), int(vision["intermediate_size"])
        patch, merge = int(vision["patch_size"]), int(vision["downsample_ratio"])
    except KeyError as error:
        raise ConfigError(f"vision_config.num_hidden_layers is set, but {error.args[0]} is missing") from None
    D, blocks = c.hidden_size, tuple(range(int(vision["num_hidden_layers"])))
    top: list[tuple[str, tuple[int, ...]]] = [
        ("image_start", (D,)),
        ("image_end", (D,)),
        ("image_newline", (D,)),
        ("aligner.w1.weight", (D, width * merge * merge)),
        ("aligner.w1.bias", (D,)),
        ("aligner.w2.weight", (D, D)),
        ("aligner.w2.bias", (D,)),
        ("vision.patch_embed.proj.weight", (width, 3 * patch * patch)),
        ("vision.patch_embed.proj.bias", (width,)),
        ("vision.norm.weight", (width,)),
    ]
    each: list[tuple[str, tuple[int, ...]]] = [
        ("norm1.weight", (width,)),
        ("norm2.weight", (width,)),
        ("attn.wqkv.weight", (3 * width, width)),
        ("attn.wqkv.bias", (3 * width,)),
        ("attn.wo.weight", (width, width)),
        ("attn.wo.bias", (width,)),
        ("mlp.w1.weight", (2 * mlp, width)),
        ("mlp.w2.weight", (width, mlp)),
    ]
    rows = [TableRow(name=n, shape=s, dtype="BF16", section="vision") for n, s in top]
    return rows + [
        TableRow(name=f"vision.blocks.{{l}}.{n}", shape=s, dtype="BF16", section="vision", layers=blocks)
        for n, s in each
    ]


def _multiplied_out(row: TableRow) -> TableRow | None:
    if row.dtype == "F8_E8M0":
        return None
    if row.kind == "plain":
        return row
    out, columns = row.shape
    return replace(row, shape=(out, 2 * columns if row.dtype == "I8" else columns), dtype="BF16")


def _specs(row: TableRow, layer: int | None) -> Iterator[TensorSpec]:
    for expert in range(row.experts) if row.experts else (None,):
        name = row.name if layer is None else row.name.replace("{l}", str(layer))
        if expert is not None:
            name = name.replace("{e}", str(expert))
        yield TensorSpec(
            name=name,
            shape=row.shape,
            dtype=row.dtype,
            kind=row.kind,
            section=row.section,
            target=_target(row, layer) if row.section == "backbone" else None,
            expert=expert,
        )


def _target(row: TableRow, layer: int | None) -> str:
    """The model's name: experts are stacked, coefficients are a module, an Engram table keeps codes and scales."""
    name = row.name.replace("{l}", str(layer))
    for side in ("attn", "ffn"):
        name = name.replace(f".hc_{side}_", f".hc_{side}.")
    if row.experts:
        return name.replace(".{e}", "").removesuffix(".weight").removesuffix(".scale")
    if row.kind != "table" and row.dtype == "F8_E8M0":
        return name.removesuffix("scale") + "weight"
    return name
