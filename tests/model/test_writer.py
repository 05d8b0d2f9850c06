from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from precede.model import writer
from precede.model.checkpoint import Checkpoint, load_checkpoint
from precede.model.config import ModelConfig, preset_json
from precede.model.errors import CheckpointError
from precede.model.shards import INDEX_NAME
from precede.model.table import SKIPPED_PREFIXES
from precede.model.tokens import TOKEN_MAP_NAME
from precede.model.writer import model_tensors, safetensors_bytes, write_checkpoint

from .checkpoint_files import nano_directory, stored_tensors


@pytest.fixture(scope="module")
def tensors():
    return stored_tensors(nano_directory())


def write(directory, tensors, **options):
    write_checkpoint(directory, tensors.items(), preset_json("nano"), **options)


def same_bytes(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(
        a[n].dtype == b[n].dtype
        and a[n].shape == b[n].shape
        and torch.equal(a[n].reshape(-1).view(torch.uint8), b[n].reshape(-1).view(torch.uint8))
        for n in a
    )


def test_safetensors_bytes_are_read_by_the_library(tmp_path):
    named = {
        "e": torch.tensor(3.0),
        "a": torch.randn(3, 5),
        "b": torch.randn(7).bfloat16(),
        "c": torch.randn(4, 4).to(torch.float8_e4m3fn),
        "d": torch.arange(5, dtype=torch.int8),
        "t": torch.arange(6.0).view(2, 3).T,
        "none": torch.empty(0, 3),
    }
    (tmp_path / "x.safetensors").write_bytes(b"".join(safetensors_bytes(named.items())))
    loaded = load_file(tmp_path / "x.safetensors")
    assert all(torch.equal(loaded[n].float(), t.float()) and loaded[n].dtype == t.dtype for n, t in named.items())


def test_round_trip_in_several_shards(tmp_path, tensors):
    write(tmp_path / "out", tensors, shard_bytes=300_000, files={"tokenizer.json": b"{}"})
    shards = sorted(p.name for p in (tmp_path / "out").glob("*.safetensors"))
    assert shards == [f"model-{i:05d}-of-00005.safetensors" for i in range(1, 6)]
    assert same_bytes(stored_tensors(tmp_path / "out"), tensors)
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == preset_json("nano")
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == b"{}"
    index = json.loads((tmp_path / "out" / INDEX_NAME).read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_loaded_model_is_written_back_without_a_changed_value(tmp_path, tensors):
    token_map = {TOKEN_MAP_NAME: (nano_directory() / TOKEN_MAP_NAME).read_bytes()}
    for numerics in ("exact32", "native"):
        model = load_checkpoint(nano_directory(), numerics)
        target = tmp_path / numerics
        write_checkpoint(target, model_tensors(model, model.config), preset_json("nano"), files=token_map)
        again = load_checkpoint(target, numerics)
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
        assert all(
            torch.equal(a.view(torch.uint8), b.view(torch.uint8))
            for a, b in zip(model.buffers(), again.buffers(), strict=True)
        )
        backbone = {n: t for n, t in tensors.items() if not n.startswith(SKIPPED_PREFIXES)}
        assert stored_tensors(target).keys() == backbone.keys()


class Interrupted(BaseException):
    pass


@pytest.mark.parametrize("error", [Interrupted, OSError("disk full"), ValueError("bug")])
def test_an_interrupted_save_leaves_nothing(tmp_path, tensors, error):
    def stream():
        for number, item in enumerate(tensors.items()):
            if number == 500:
                raise error
            yield item

    with pytest.raises((Interrupted, CheckpointError, ValueError)):
        write_checkpoint(tmp_path / "out", stream(), preset_json("nano"), shard_bytes=100_000)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop("norm.weight"), r"norm\.weight is missing"),
        (lambda t: t.update(extra=torch.ones(1)), "extra is no tensor"),
        (lambda t: t.update({"norm.weight": torch.ones(64)}), "is F32, expected BF16"),
    ],
)
def test_what_does_not_fit_the_config_is_not_written(tmp_path, tensors, edit, message):
    changed = dict(tensors)
    edit(changed)
    with pytest.raises(CheckpointError, match=message):
        write(tmp_path / "out", changed)
    assert list(tmp_path.iterdir()) == []


def test_a_name_given_twice_is_refused(tmp_path, tensors):
    twice = [*tensors.items(), ("norm.weight", tensors["norm.weight"])]
    with pytest.raises(CheckpointError, match=r"norm\.weight was given twice"):
        write_checkpoint(tmp_path / "out", twice, preset_json("nano"))
    assert list(tmp_path.iterdir()) == []


def test_a_full_target_is_refused_and_replaced_on_request(tmp_path, tensors):
    target = tmp_path / "out"
    target.mkdir()
    write(target, tensors)  # an empty directory is no obstacle
    with pytest.raises(CheckpointError, match="out: is not empty"):
        write(target, tensors)
    changed = {**tensors, "norm.weight": torch.full((64,), 2.0, dtype=torch.bfloat16)}
    write(target, changed, overwrite=True)
    assert stored_tensors(target)["norm.weight"].unique().tolist() == [2.0]
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_overwrite_spares_what_is_no_checkpoint(tmp_path, tensors):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("words")
    with pytest.raises(CheckpointError, match=r"holds thesis\.tex, which is no part of a checkpoint"):
        write(tmp_path / "out", tensors, overwrite=True)
    assert (tmp_path / "out" / "thesis.tex").read_text() == "words"


def test_a_failed_replacement_keeps_the_old_checkpoint(tmp_path, tensors, monkeypatch):
    target = tmp_path / "out"
    write(target, tensors)
    rename = Path.rename

    def refuse(self, to):
        if ".partial-" in self.name and not self.name.endswith("-old"):
            raise OSError(5, "Input/output error")
        return rename(self, to)

    monkeypatch.setattr(writer.Path, "rename", refuse)
    with pytest.raises(CheckpointError, match="out: cannot be written: Input/output error"):
        write(target, tensors, overwrite=True)
    monkeypatch.undo()
    assert same_bytes(stored_tensors(target), tensors)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_place_that_cannot_be_written(tmp_path, tensors):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"file/out: cannot be written: .*file is a file"):
        write(tmp_path / "file" / "out", tensors)
    with pytest.raises(CheckpointError, match="file: is a file"):
        write(tmp_path / "file", tensors)


def test_written_checkpoints_open(tmp_path, tensors):
    write(tmp_path / "out", tensors)
    assert Checkpoint.open(tmp_path / "out").config == ModelConfig.preset("nano")
