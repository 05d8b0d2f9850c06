from __future__ import annotations

import json
import time

import pytest
import torch

from precede.model import init
from precede.model.checkpoint import Checkpoint
from precede.model.config import ModelConfig, preset_json
from precede.model.errors import CheckpointError, ConfigError
from precede.model.init import init_checkpoint, random_values
from precede.model.table import SKIPPED_PREFIXES, tensor_table
from precede.model.tokens import TOKEN_MAP_NAME, TOKENIZER_NAME, load_token_map

from .checkpoint_files import nano_directory, stored_tensors

CONFIG = ModelConfig.preset("nano")


def contents(directory):
    return {p.name: p.read_bytes() for p in directory.iterdir()}


def test_same_seed_same_bytes_whatever_the_threads(tmp_path):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        init_checkpoint("nano", tmp_path / "again", seed=1)
    finally:
        torch.set_num_threads(threads)
    assert contents(tmp_path / "again") == contents(nano_directory())


def test_another_seed_gives_other_weights(tmp_path):
    init_checkpoint("nano", tmp_path / "other", seed=2)
    a, b = stored_tensors(tmp_path / "other"), stored_tensors(nano_directory())
    same = [n for n in a if torch.equal(a[n].view(-1).view(torch.uint8), b[n].view(-1).view(torch.uint8))]
    # Scale bytes of small tensors may coincide; the only constants are the coefficient scales and the dummies.
    assert all(n.endswith(("scale", *init.SKIPPED_TENSORS)) for n in same)


def test_files_of_a_checkpoint():
    held = contents(nano_directory())
    assert set(held) == {
        "config.json",
        TOKENIZER_NAME,
        TOKEN_MAP_NAME,
        "model.safetensors.index.json",
        "model-00001-of-00001.safetensors",
    }
    assert json.loads(held["config.json"]) == preset_json("nano")
    assert load_token_map(nano_directory(), CONFIG).tolist() == [i % 256 for i in range(512)]


def test_every_skipped_prefix_has_a_tensor():
    skipped = Checkpoint.open(nano_directory()).skipped
    assert all(any(n.startswith(p) for n in skipped) for p in SKIPPED_PREFIXES)


def test_distributions():
    table = tensor_table(ModelConfig.preset("mini"))
    mini = ModelConfig.preset("mini")

    def values(name):
        return random_values(table[name], mini, 0)

    for name, mean, std in (
        ("embed.weight", 0.0, 1.0),
        ("layers.0.attn.wo_b.weight", 0.0, 512**-0.5),
        ("layers.3.ffn.experts.1.w2.weight", 0.0, 256**-0.5),
        ("layers.5.attn_norm.weight", 1.0, 0.1),
        ("layers.1.engram.q_weight", 1.0, 0.1),
        ("layers.1.engram.embed.weight", 0.0, 1.0),
        ("layers.0.hc_attn_fn", 0.0, 2048**-0.5),
    ):
        drawn = values(name)
        assert tuple(drawn.shape) == table[name].value_shape
        assert abs(float(drawn.mean()) - mean) < 5 * std / drawn.numel() ** 0.5
        assert abs(float(drawn.std()) / std - 1) < 5 / drawn.numel() ** 0.5
    base = values("layers.0.hc_ffn_base")
    assert torch.equal(base[8:].view(4, 4), 2 * torch.eye(4))
    assert not base[4:8].any()
    assert base[:4].all()
    assert values("layers.0.hc_ffn_scale").tolist() == [1.0, 1.0, 1.0]
    assert values("layers.0.ffn.gate.bias").abs().max() <= 0.2


def test_progress_ends_at_the_total(tmp_path):
    calls = []
    init_checkpoint("nano", tmp_path / "nano", progress=lambda *call: calls.append(call))
    assert calls[-1][0] == calls[-1][1] == sum(s.nbytes for s in tensor_table(CONFIG).values())


def test_from_a_config_file_and_from_json(tmp_path):
    data = preset_json("nano")
    data["text_config"]["num_hidden_layers"] = 10
    (tmp_path / "mine.json").write_text(json.dumps(data))
    init_checkpoint(tmp_path / "mine.json", tmp_path / "a", seed=3)
    init_checkpoint(data, tmp_path / "b", seed=3)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_faults_leave_nothing(tmp_path):
    data = preset_json("nano")
    data["text_config"] |= {"vocab_size": 200, "engram_compressed_vocab_size": 100}
    data["image_token_id"] = 150
    with pytest.raises(ConfigError, match="vocab_size = 200 is too small for a byte-level tokenizer"):
        init_checkpoint(data, tmp_path / "small")
    with pytest.raises(ConfigError, match="no such file"):
        init_checkpoint("nanoo", tmp_path / "typo")
    with pytest.raises(CheckpointError, match=r"embed\.weight .* is too large to be synthesised"):
        init_checkpoint("published", tmp_path / "large")
    data = preset_json("nano")
    data["text_config"]["n_routed_experts"] = 10**9
    with pytest.raises(CheckpointError, match="is too large to be synthesised"):
        init_checkpoint(data, tmp_path / "experts")
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_noticed_first(tmp_path, monkeypatch):
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(init.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(CheckpointError, match=r"needs 0\.0 GB, the disk has 0\.0 GB free"):
        init_checkpoint("nano", tmp_path / "nano")


def test_a_full_target_is_refused_before_any_work(tmp_path, monkeypatch):
    (tmp_path / "x").write_text("")
    monkeypatch.setattr(init, "random_values", None)
    with pytest.raises(CheckpointError, match="is not empty"):
        init_checkpoint("nano", tmp_path)


@pytest.mark.slow
def test_mini_takes_seconds(tmp_path):
    before = time.process_time()
    init_checkpoint("mini", tmp_path / "mini")
    assert time.process_time() - before < 15
    assert len(Checkpoint.open(tmp_path / "mini").extents) == 1556
