from __future__ import annotations

import subprocess
import sys

import pytest

from precede.model.config import ModelConfig, preset_json
from precede.model.errors import ConfigError
from precede.model.table import skipped_rows, table_rows, tensor_table, totals


@pytest.fixture(scope="module")
def published():
    return tensor_table(ModelConfig.preset("published"), data=preset_json("published"))


def test_published_totals_are_exact():
    config = ModelConfig.preset("published")
    rows = table_rows(config) + skipped_rows(config, preset_json("published"))
    assert totals(rows) == {
        "backbone": (93_418, 510_286_023_000 - 7_932_874_632 - 970_536_960, 551_880_835_184 + 196_613_849_600),
        "draft": (2_401, 7_932_874_632, 14_225_362_530),
        "vision": (266, 970_536_960, 485_268_480),
        "total": (96_085, 510_286_023_000, 763_205_315_794),
    }


def test_expanded_table_agrees_with_its_rows(published):
    assert len(published) == 96_085
    assert sum(s.nbytes for s in published.values()) == 510_286_023_000
    assert sum(s.target is not None for s in published.values()) == 93_418


@pytest.mark.parametrize(("name", "parameters"), [("nano", 1_250_020), ("mini", 103_771_048), ("slice", 6_545_596_336)])
def test_ladder_parameter_counts(name, parameters):
    assert totals(table_rows(ModelConfig.preset(name)))["backbone"][2] == parameters


@pytest.mark.parametrize(
    ("name", "shape", "dtype", "target"),
    [
        ("embed.weight", (129280, 5120), "BF16", "embed.weight"),
        ("layers.39.hc_attn_fn", (24, 20480), "F32", "layers.39.hc_attn.fn"),
        ("layers.0.hc_ffn_base", (24,), "F32", "layers.0.hc_ffn.base"),
        ("layers.0.attn.wo_a.weight", (8192, 4096), "F8_E4M3", "layers.0.attn.wo_a.weight"),
        ("layers.0.attn.wo_a.scale", (256, 128), "F8_E8M0", "layers.0.attn.wo_a.weight"),
        ("layers.7.ffn.experts.383.w2.weight", (5120, 1152), "I8", "layers.7.ffn.experts.w2"),
        ("layers.7.ffn.experts.383.w1.scale", (2304, 160), "F8_E8M0", "layers.7.ffn.experts.w1"),
        ("layers.14.engram.embed.weight", (384016682, 256), "F8_E4M3", "layers.14.engram.embed.weight"),
        ("layers.14.engram.embed.scale", (384016682, 8), "F8_E8M0", "layers.14.engram.embed.scale"),
        ("layers.1.engram.wkv.scale", (800, 192), "F8_E8M0", "layers.1.engram.wkv.weight"),
        ("layers.36.attn.indexer.wq_b.weight", (4096, 1280), "F8_E4M3", "layers.36.attn.indexer.wq_b.weight"),
        ("layers.20.attn.compressor.wkv.weight", (512, 5120), "BF16", "layers.20.attn.compressor.wkv.weight"),
        ("mtp.2.confidence_head.proj.weight", (1, 5376), "BF16", None),
        ("mtp.0.main_proj.scale", (160, 480), "F8_E8M0", None),
        ("vision.blocks.31.mlp.w2.weight", (1024, 2816), "BF16", None),
        ("aligner.w1.weight", (5120, 9216), "BF16", None),
    ],
)
def test_published_entries(published, name, shape, dtype, target):
    spec = published[name]
    assert (spec.shape, spec.dtype, spec.target) == (shape, dtype, target)


def test_ratio_one_sources_have_no_pooling_gate(published):
    gates = [n for n in published if "compressor.wgate" in n]
    assert gates == [f"layers.{i}.attn.compressor.wgate.weight" for i in (2, 8, 14)]


def test_plain_form_has_no_scales_and_full_columns():
    config = ModelConfig.preset("nano")
    plain, stored = tensor_table(config, plain=True), tensor_table(config)
    assert set(plain) == {n for n, s in stored.items() if not s.is_scale}
    assert all(plain[n].shape == stored[n].value_shape for n in plain)
    assert {s.dtype for s in plain.values()} == {"BF16", "F32"}
    assert all(s.scale_name is None for s in plain.values())


def test_layers_are_written_in_short():
    rows = {r.name: r for r in table_rows(ModelConfig.preset("published"))}
    assert rows["layers.{l}.attn_norm.weight"].layers_text == "0-39"
    assert rows["layers.{l}.attn.indexer.wk.weight"].layers_text == "2,8,14,20"
    assert rows["norm.weight"].layers_text == "-"


def test_announced_draft_without_sizes_is_refused():
    data = preset_json("published")
    del data["text_config"]["dspark_markov_rank"]
    with pytest.raises(ConfigError, match="dspark_markov_rank is missing"):
        skipped_rows(ModelConfig.from_dict(data), data)


def test_table_needs_no_torch():
    code = "import precede.model.table, sys; assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
