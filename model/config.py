"""The model's config: published JSON in, checked and frozen.

Accepts the published nesting (`text_config`), a flat file, and the short key names of the reference program. A value
that the definition does not implement (another activation, another scoring function) is refused rather than ignored.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib import resources
from pathlib import Path
from typing import Any

from .errors import ConfigError
from .ngram import ngram_buckets

PRESETS = ("nano", "mini", "slice", "published")

ALIASES = {
    "dim": "hidden_size",
    "moe_inter_dim": "moe_intermediate_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "rope_head_dim": "qk_rope_head_dim",
    "norm_eps": "rms_norm_eps",
    "window_size": "sliding_window",
    "kv_source_layers": "kv_source_layer_ids",
    "index_source_layers": "index_source_layer_ids",
    "candidate_source_layer": "candidate_source_layer_id",
    "engram_pad_id": "engram_pad_token_id",
    "rope_factor": "rope_scaling.factor",
    "original_seq_len": "rope_scaling.original_max_position_embeddings",
    "beta_fast": "rope_scaling.beta_fast",
    "beta_slow": "rope_scaling.beta_slow",
    "score_func": "scoring_func",
    "route_scale": "routed_scaling_factor",
    "n_activated_experts": "num_experts_per_tok",
    "n_mtp_layers": "num_nextn_predict_layers",
}

# What the definition implements; a file may leave these keys out, but may not say anything else.
FIXED = {
    "hidden_act": "silu",
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "num_key_value_heads": 1,
    "n_shared_experts": 1,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "rope_scaling.rope_type": "yarn",
    "quantization_config.quant_method": "fp8",
    "quantization_config.activation_scheme": "dynamic",
    "quantization_config.weight_block_size": [32, 32],
    "quantization_config.scale_fmt": "ue8m0",
    "quantization_config.expert_dtype": "fp4",
}

# Beyond these a number is a slip of the pen, and arithmetic on it would overflow somewhere below.
MOST_DIGITS = 18
LARGEST_SIZE = 1 << 31
LARGEST_NUMBER = 1e30
MOST_ELEMENTS = 1 << 60

DEFAULTS: dict[str, Any] = {
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-20,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "rope_scaling.beta_fast": 32,
    "rope_scaling.beta_slow": 1,
    "num_nextn_predict_layers": 0,
    "engram_pad_token_id": 2,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes and constants of the text backbone; field names are the published keys (spec: config.json)."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    max_position_embeddings: int
    # attention
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    sliding_window: int
    # rotary embedding
    rope_theta: float
    compress_rope_theta: float
    rope_factor: float
    rope_original_max_position: int
    rope_beta_fast: float
    rope_beta_slow: float
    # compressed KV and its index
    compress_ratios: tuple[int, ...]
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    candidate_source_layer_id: int
    candidate_topk_blocks: int
    candidate_block_size: int
    # experts
    moe_intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    routed_scaling_factor: float
    swiglu_limit: float
    # hyper-connections and norms
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    rms_norm_eps: float
    # n-gram memory
    engram_layer_ids: tuple[int, ...]
    engram_num_embeddings: tuple[int, ...]
    engram_max_ngram_size: int
    engram_vocab_size: int
    engram_n_heads: int
    engram_head_dim: int
    engram_pad_token_id: int
    engram_compressed_vocab_size: int
    # tokens
    bos_token_id: int
    eos_token_id: int
    pad_token_id: int
    image_token_id: int
    num_nextn_predict_layers: int = 0

    def __post_init__(self) -> None:
        check_invariants(self)

    @classmethod
    def preset(cls, name: str) -> ModelConfig:
        """One of the shipped configs: nano, mini, slice, published."""
        if name not in PRESETS:
            raise ConfigError(f"no preset named {name!r}; there are {', '.join(PRESETS)}")
        return cls.from_dict(preset_json(name), source=f"preset {name}")

    @classmethod
    def from_file(cls, path: str | Path) -> ModelConfig:
        """Read a config.json. Raises ConfigError for a file that is missing, is no JSON object, or breaks a rule."""
        return cls.from_dict(read_json_object(Path(path)), source=str(path))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], *, source: str = "config") -> ModelConfig:
        """Build from the parsed JSON, published nesting or flat; `source` names it in error messages."""
        reader = _Reader(data, source)
        for key, value in FIXED.items():
            reader.fixed(key, value)
        rope = {
            "rope_factor": "rope_scaling.factor",
            "rope_original_max_position": "rope_scaling.original_max_position_embeddings",
            "rope_beta_fast": "rope_scaling.beta_fast",
            "rope_beta_slow": "rope_scaling.beta_slow",
        }
        values = {f.name: reader.typed(rope.get(f.name, f.name), str(f.type)) for f in fields(cls)}
        try:
            return cls(**values)
        except ConfigError as error:
            raise ConfigError(f"{source}: {error}") from None

    @property
    def cut(self) -> int:
        """The last KV source: layers after it own nothing but their window."""
        return max(self.kv_source_layer_ids)

    @property
    def lookback(self) -> int:
        """How many ids before the chunk an n-gram can reach."""
        return self.engram_max_ngram_size - 1

    @property
    def engram_columns(self) -> int:
        """Table rows that one token reads in one layer: (n-gram sizes) x heads."""
        return (self.engram_max_ngram_size - 1) * self.engram_n_heads

    def kv_source(self, layer: int) -> int:
        """The layer whose compressed entries `layer` reads (ratio > 0 only)."""
        return max(s for s in self.kv_source_layer_ids if s <= layer)


def preset_json(name: str) -> dict[str, Any]:
    """The shipped config file `name` as parsed JSON."""
    return json.loads(resources.files("precede.model").joinpath(f"configs/{name}.json").read_text())


def read_json_object(path: Path) -> dict[str, Any]:
    """Parse a JSON file that must hold an object; every failure is a ConfigError that names the file."""

    def integer(digits: str) -> int:
        if len(digits.lstrip("-")) > MOST_DIGITS:
            raise ConfigError(f"{path}: holds an integer of {len(digits)} digits; give at most {MOST_DIGITS}")
        return int(digits)

    try:
        data = json.loads(path.read_text(encoding="utf-8"), parse_int=integer)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; a checkpoint directory holds config.json") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}: not JSON: {error.msg} at line {error.lineno}") from None
    except RecursionError:
        raise ConfigError(f"{path}: holds lists or objects nested too deep to be read") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: holds a JSON {type(data).__name__}, expected an object")
    return data


class _Reader:
    """Looks keys up in text_config, then at the top, by published name, then by alias."""

    def __init__(self, data: Mapping[str, Any], source: str) -> None:
        self.source = source
        self.flat: dict[str, Any] = {}
        text = data.get("text_config", {})
        if not isinstance(text, Mapping):
            raise ConfigError(f"{source}: text_config is a {type(text).__name__}, expected an object")
        for level in (text, data):
            for key, value in level.items():
                if isinstance(value, Mapping) and key in ("rope_scaling", "quantization_config"):
                    for inner, item in value.items():
                        self._offer(f"{key}.{inner}", item)
                elif not isinstance(value, Mapping):
                    self._offer(key, value)

    def _offer(self, key: str, value: Any) -> None:
        for item in value if isinstance(value, list | tuple) else (value,):
            if isinstance(item, int) and abs(item) >= 10**MOST_DIGITS:
                raise ConfigError(f"{self.source}: {key} holds an integer of more than {MOST_DIGITS} digits")
            if isinstance(item, float) and not math.isfinite(item):
                raise ConfigError(f"{self.source}: {key} holds {item}, expected a finite number")
        self.flat.setdefault(ALIASES.get(key, key), value)

    def fixed(self, key: str, only: Any) -> None:
        found = self.flat.get(key, only)
        if found != only:
            raise ConfigError(f"{self.source}: {key} is {found!r}; this model family has {only!r} only")

    def typed(self, key: str, kind: str) -> Any:
        if key not in self.flat and key not in DEFAULTS:
            raise ConfigError(f"{self.source}: {key} is missing")
        value = self.flat.get(key, DEFAULTS.get(key))
        if kind == "int" and isinstance(value, int) and not isinstance(value, bool):
            return value
        if kind == "float" and isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        if kind.startswith("tuple") and isinstance(value, list | tuple):
            if all(isinstance(v, int) and not isinstance(v, bool) for v in value):
                return tuple(value)
            raise ConfigError(f"{self.source}: {key} must hold integers only, got {list(value)!r}")
        wanted = {"int": "an integer", "float": "a number"}.get(kind, "a list of integers")
        raise ConfigError(f"{self.source}: {key} must be {wanted}, got {value!r}")


def check_invariants(c: ModelConfig) -> None:
    """Refuse a config that breaks a rule of the family. Raises ConfigError; the message starts with the key."""

    def need(ok: bool, message: str) -> None:
        if not ok:
            raise ConfigError(message)

    optional = {"candidate_source_layer_id", "num_nextn_predict_layers", "bos_token_id", "eos_token_id"}
    optional |= {"pad_token_id", "image_token_id", "engram_pad_token_id"}
    for f in fields(c):
        value = getattr(c, f.name)
        if isinstance(value, int | float) and f.name not in optional:
            need(value > 0, f"{f.name} must be positive, got {value}")
        if isinstance(value, int) and f.name != "engram_vocab_size":
            need(value <= LARGEST_SIZE, f"{f.name} = {value} is too large; the largest size is {LARGEST_SIZE}")
        if isinstance(value, float):
            need(value <= LARGEST_NUMBER, f"{f.name} = {value} is too large; the largest number is {LARGEST_NUMBER}")
    need(c.hc_sinkhorn_iters <= 1000, f"hc_sinkhorn_iters = {c.hc_sinkhorn_iters}, expected at most 1000")
    need(
        c.engram_columns <= 1024,
        f"engram_max_ngram_size = {c.engram_max_ngram_size} and engram_n_heads = {c.engram_n_heads} make "
        f"{c.engram_columns} n-gram columns, expected at most 1024",
    )
    heads, o_rank = c.num_attention_heads * c.head_dim, c.o_groups * c.o_lora_rank
    elements = {
        "vocab_size x hidden_size": c.vocab_size * c.hidden_size,
        "q_lora_rank x hidden_size": c.q_lora_rank * c.hidden_size,
        "num_attention_heads x head_dim x q_lora_rank": heads * c.q_lora_rank,
        "num_attention_heads x head_dim x o_lora_rank": heads * c.o_lora_rank,
        "o_groups x o_lora_rank x hidden_size": o_rank * c.hidden_size,
        "index_n_heads x index_head_dim x q_lora_rank": c.index_n_heads * c.index_head_dim * c.q_lora_rank,
        "index_n_heads x hidden_size": c.index_n_heads * c.hidden_size,
        "head_dim x hidden_size": c.head_dim * c.hidden_size,
        "head_dim x index_head_dim": c.head_dim * c.index_head_dim,
        "sliding_window x head_dim": c.sliding_window * c.head_dim,
        "max_position_embeddings x qk_rope_head_dim": c.max_position_embeddings * c.qk_rope_head_dim,
        "n_routed_experts x moe_intermediate_size x hidden_size": 2
        * c.n_routed_experts
        * c.moe_intermediate_size
        * c.hidden_size,
        "hc_mult x hc_mult x hc_mult x hidden_size": (c.hc_mult + 2) * c.hc_mult**2 * c.hidden_size,
        "hc_mult x hidden_size x engram_head_dim": (c.hc_mult + 1)
        * c.hidden_size
        * max(1, c.engram_columns)
        * c.engram_head_dim,
    }
    for key, count in elements.items():
        need(count <= MOST_ELEMENTS, f"{key} makes a tensor of {count} elements, expected at most {MOST_ELEMENTS}")
    L = c.num_hidden_layers
    need(
        len(c.compress_ratios) == L + c.num_nextn_predict_layers,
        f"compress_ratios has {len(c.compress_ratios)} entries, expected num_hidden_layers + "
        f"num_nextn_predict_layers = {L + c.num_nextn_predict_layers}",
    )
    for i, ratio in enumerate(c.compress_ratios):
        need(ratio in (0, 1, 2), f"compress_ratios[{i}] is {ratio}, expected 0, 1 or 2")
        need(i < L or ratio == 0, f"compress_ratios[{i}] is {ratio}; draft layers must have 0")
    for key in ("kv_source_layer_ids", "index_source_layer_ids", "engram_layer_ids"):
        ids = getattr(c, key)
        need(list(ids) == sorted(set(ids)), f"{key} must be strictly ascending, got {list(ids)}")
        need(all(0 <= i < L for i in ids), f"{key} names a layer outside 0..{L - 1}: {list(ids)}")
    need(len(c.kv_source_layer_ids) > 0, "kv_source_layer_ids is empty; the model needs one compressed KV source")
    for s in c.kv_source_layer_ids:
        need(s in c.index_source_layer_ids, f"kv_source_layer_ids has {s}, which is not in index_source_layer_ids")
    for s in c.index_source_layer_ids:
        need(c.compress_ratios[s] > 0, f"index_source_layer_ids has {s}, but compress_ratios[{s}] is 0")
    for layer in range(L):
        if c.compress_ratios[layer] == 0:
            continue
        below = [s for s in c.kv_source_layer_ids if s <= layer]
        need(bool(below), f"compress_ratios[{layer}] > 0, but kv_source_layer_ids has no source at or below it")
        need(
            c.compress_ratios[below[-1]] == c.compress_ratios[layer],
            f"compress_ratios[{layer}] is {c.compress_ratios[layer]}, its KV source {below[-1]} has "
            f"{c.compress_ratios[below[-1]]}",
        )
    candidate = c.candidate_source_layer_id
    need(
        candidate == -1 or candidate in c.index_source_layer_ids,
        f"candidate_source_layer_id is {candidate}, expected -1 or a member of index_source_layer_ids",
    )
    if candidate >= 0:
        for layer in range(candidate, L):
            need(
                c.compress_ratios[layer] > 0 and c.kv_source(layer) == c.kv_source(candidate),
                f"candidate_source_layer_id is {candidate}, but layer {layer} after it reads another KV source",
            )
        reach = (c.candidate_topk_blocks - 1) * c.candidate_block_size + 1
        need(
            reach >= c.index_topk,
            f"candidate_topk_blocks x candidate_block_size surely covers only {reach} entries, fewer than "
            f"index_topk = {c.index_topk}",
        )
    need(
        c.num_attention_heads % c.o_groups == 0,
        f"o_groups = {c.o_groups} does not divide num_attention_heads = {c.num_attention_heads}",
    )
    need(
        c.qk_rope_head_dim % 2 == 0 and c.qk_rope_head_dim <= min(c.head_dim, c.index_head_dim),
        f"qk_rope_head_dim = {c.qk_rope_head_dim} must be even and at most head_dim and index_head_dim",
    )
    need(
        c.num_experts_per_tok <= c.n_routed_experts,
        f"num_experts_per_tok = {c.num_experts_per_tok} exceeds n_routed_experts = {c.n_routed_experts}",
    )
    quantised = {
        "hidden_size": c.hidden_size,
        "moe_intermediate_size": c.moe_intermediate_size,
        "q_lora_rank": c.q_lora_rank,
        "head_dim": c.head_dim,
        "index_head_dim": c.index_head_dim,
        "o_groups * o_lora_rank": c.o_groups * c.o_lora_rank,
        "num_attention_heads * head_dim / o_groups": c.num_attention_heads * c.head_dim // c.o_groups,
    }
    if c.engram_layer_ids:
        quantised["engram_head_dim"] = c.engram_head_dim
    for key, value in quantised.items():
        need(value % 32 == 0, f"{key} = {value} must be divisible by 32 (block scales)")
    need(
        len(c.engram_num_embeddings) == len(c.engram_layer_ids),
        f"engram_num_embeddings has {len(c.engram_num_embeddings)} entries for {len(c.engram_layer_ids)} "
        "engram_layer_ids",
    )
    need(
        c.engram_max_ngram_size >= 2 or not c.engram_layer_ids,
        f"engram_max_ngram_size = {c.engram_max_ngram_size}, expected at least 2",
    )
    if c.engram_layer_ids:
        need(
            c.engram_vocab_size <= 2**32,
            f"engram_vocab_size = {c.engram_vocab_size} is too large; bucket primes are searched up to 2^32",
        )
        buckets = ngram_buckets(len(c.engram_layer_ids), c.engram_max_ngram_size, c.engram_n_heads, c.engram_vocab_size)
        need(
            c.engram_num_embeddings == buckets.rows(),
            f"engram_num_embeddings is {list(c.engram_num_embeddings)}; the bucket primes above engram_vocab_size = "
            f"{c.engram_vocab_size} sum to {list(buckets.rows())}",
        )
    need(c.hc_mult >= 2, f"hc_mult = {c.hc_mult}, expected at least 2")
    need(
        c.engram_compressed_vocab_size <= c.vocab_size,
        f"engram_compressed_vocab_size = {c.engram_compressed_vocab_size} exceeds vocab_size = {c.vocab_size}",
    )
    for key in ("bos_token_id", "eos_token_id", "pad_token_id", "image_token_id", "engram_pad_token_id"):
        value = getattr(c, key)
        need(0 <= value < c.vocab_size, f"{key} = {value} is outside the vocabulary of {c.vocab_size}")
