"""Reading config.json: the published file, aliases, every rule refused by the name of its key."""

from __future__ import annotations

import copy
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from precede.model.config import PRESETS, ModelConfig, preset_json
from precede.model.errors import ConfigError


def test_published_file_is_the_published_one() -> None:
    text = (Path(__file__).parents[2] / "model" / "configs" / "published.json").read_bytes()
    assert hashlib.sha256(text).hexdigest() == "8be45ce0476004a3f529fd896115a4a2e800a129ad2d3ec05b16050f52e21879"
    c = ModelConfig.preset("published")
    assert (c.num_hidden_layers, c.hidden_size, c.n_routed_experts, c.cut, c.lookback) == (40, 5120, 384, 20, 3)
    assert c.compress_ratios[:40] == (0, 0, *[2] * 18, *[1] * 20)
    assert (c.rms_norm_eps, c.swiglu_limit, c.engram_columns) == (1e-20, 10.0, 24)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_load_and_have_a_decoder_half(name: str) -> None:
    c = ModelConfig.preset(name)
    assert c.cut == c.num_hidden_layers // 2


def test_sources_of_layers() -> None:
    c = ModelConfig.preset("published")
    assert [c.kv_source(i) for i in (2, 7, 8, 19, 20, 39)] == [2, 2, 8, 14, 20, 20]


def test_short_names_of_the_reference_program() -> None:
    text = preset_json("nano")["text_config"]
    short = {
        "hidden_size": "dim",
        "num_hidden_layers": "n_layers",
        "sliding_window": "window_size",
        "kv_source_layer_ids": "kv_source_layers",
        "candidate_source_layer_id": "candidate_source_layer",
        "engram_pad_token_id": "engram_pad_id",
        "num_experts_per_tok": "n_activated_experts",
        "routed_scaling_factor": "route_scale",
    }
    flat = {short.get(k, k): v for k, v in text.items() if k != "rope_scaling"}
    rope = text["rope_scaling"]
    flat |= {"rope_factor": rope["factor"], "original_seq_len": rope["original_max_position_embeddings"]}
    flat |= {"beta_fast": 32, "beta_slow": 1, "image_token_id": 510}
    assert ModelConfig.from_dict(flat) == ModelConfig.preset("nano")


BROKEN: list[tuple[str, Any]] = [
    ("compress_ratios", [0, 0, 2]),
    ("compress_ratios", [0, 0, 2, 2, 2, 3, 1, 1, 1, 1]),
    ("compress_ratios", [0, 2, 2, 2, 2, 1, 1, 1, 1, 1]),
    ("compress_ratios", [0, 0, 2, 2, 2, 1, 1, 2, 1, 1]),
    ("kv_source_layer_ids", []),
    ("kv_source_layer_ids", [4, 2, 5]),
    ("kv_source_layer_ids", [2, 3, 5]),
    ("kv_source_layer_ids", [2, 4, 5, 10]),
    ("index_source_layer_ids", [1, 2, 4, 5, 7, 9]),
    ("candidate_source_layer_id", 6),
    ("candidate_source_layer_id", 4),
    ("candidate_topk_blocks", 2),
    ("o_groups", 3),
    ("qk_rope_head_dim", 15),
    ("qk_rope_head_dim", 128),
    ("num_experts_per_tok", 9),
    ("hidden_size", 72),
    ("head_dim", 60),
    ("vocab_size", 0),
    ("vocab_size", "512"),
    ("vocab_size", True),
    ("rms_norm_eps", -1.0),
    ("engram_num_embeddings", [462]),
    ("engram_num_embeddings", [462, 631]),
    ("engram_layer_ids", [1, 12]),
    ("engram_vocab_size", 10**18),
    ("engram_max_ngram_size", 1),
    ("engram_compressed_vocab_size", 600),
    ("engram_pad_token_id", 512),
    ("hc_mult", 1),
    ("hidden_act", "gelu"),
    ("scoring_func", "sigmoid"),
    ("topk_method", "greedy"),
    ("norm_topk_prob", False),
    ("n_shared_experts", 2),
    ("num_key_value_heads", 4),
    ("tie_word_embeddings", True),
    ("index_source_layer_ids", [2, 4, 5.5]),
    ("hidden_size", 10**30),
    ("hidden_size", 10**5000),
    ("compress_ratios", [10**5000]),
    ("hidden_act", 10**5000),
    ("vocab_size", 2**62),
    ("vocab_size", 10**17),
    ("rope_theta", 10**400),
    ("rope_theta", float("inf")),
    ("rope_theta", float("nan")),
    ("rope_theta", 1e300),
    ("hc_sinkhorn_iters", 10**9),
    ("engram_n_heads", 10**9),
    ("n_routed_experts", 2**31),
]


@pytest.mark.parametrize(("key", "value"), BROKEN, ids=[f"{k}-{i}" for i, (k, _) in enumerate(BROKEN)])
def test_a_broken_rule_names_its_key(key: str, value: Any) -> None:
    data = preset_json("nano")
    data["text_config"][key] = value
    if key == "n_routed_experts":
        data["text_config"] |= {"moe_intermediate_size": 2**20, "hidden_size": 2**20}
    with pytest.raises(ConfigError, match=key) as error:
        ModelConfig.from_dict(data, source="my/config.json")
    assert str(error.value).startswith("my/config.json: ")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("key", ["hidden_size", "sliding_window", "engram_vocab_size", "swiglu_limit"])
def test_a_missing_key_is_named(key: str) -> None:
    data = preset_json("nano")
    del data["text_config"][key]
    with pytest.raises(ConfigError, match=f"{key} is missing"):
        ModelConfig.from_dict(data)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("quantization_config", "expert_dtype"), "fp8"),
        (("quantization_config", "weight_block_size"), [128, 128]),
        (("text_config", "rope_scaling", "rope_type"), "linear"),
    ],
)
def test_another_format_is_refused(path: tuple[str, ...], value: Any) -> None:
    data = copy.deepcopy(preset_json("nano"))
    owner = data
    for key in path[:-1]:
        owner = owner[key]
    owner[path[-1]] = value
    with pytest.raises(ConfigError, match=path[-1]):
        ModelConfig.from_dict(data)


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"text_config": 3}', "\x00\xff", '{"a": 1%s}' % ("0" * 5000), "[" * 100_000]
)
def test_a_file_that_is_no_config(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"config\.json"):
        ModelConfig.from_file(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        ModelConfig.from_file(tmp_path / "config.json")


def test_round_trip_through_a_file(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(preset_json("mini")))
    assert ModelConfig.from_file(path) == ModelConfig.preset("mini")
