import json
import os
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from precede.lowering import bundle as home
from precede.lowering.bundle import PartContents, checkpoint_digests, read_bundle, write_bundle
from precede.lowering.errors import BundleError
from precede.lowering.part import PartSpec
from precede.model.config import preset_json
from precede.model.errors import ConfigError


def tree(path):
    return {p.relative_to(path).as_posix(): p.read_bytes() for p in path.rglob("*") if p.is_file()}


def test_folder(engine, checkpoint):
    names = set(tree(engine))
    assert names == {
        "manifest.json",
        "config.json",
        "tokenizer.json",
        "parts/main.json",
        "parts/main.ir",
        "passes/00_canonicalize.ir",
        "passes/00_canonicalize.diff",
    }
    bundle = read_bundle(engine)
    assert bundle.checkpoint == checkpoint
    assert {f.path for f in bundle.manifest.files} == names - {"manifest.json"}
    assert [(w.name, w.dtype, w.shape) for w in bundle.manifest.weights] == [("embed.weight", "float32", [10, 4])]
    assert bundle.manifest.symbols == {"T": (1, 64)}
    assert bundle.layout.page_size == 16


def test_no_pickle_anywhere(tmp_path, contents):
    write_bundle(tmp_path / "e", contents(copy_weights=True, report="<html></html>"))
    assert {os.path.splitext(n)[1] for n in tree(tmp_path / "e")} <= {".json", ".ir", ".diff", ".safetensors", ".html"}


def test_copied_weights_make_it_self_contained(tmp_path, contents, checkpoint):
    write_bundle(tmp_path / "e", contents(copy_weights=True))
    expected = tree(checkpoint)
    shutil.rmtree(checkpoint)
    moved = tmp_path / "elsewhere"
    shutil.move(tmp_path / "e", moved)
    bundle = read_bundle(moved, full=True)
    assert bundle.checkpoint == moved / "weights"
    assert tree(bundle.checkpoint) == expected


def test_engine_and_checkpoint_move_together(tmp_path, engine, checkpoint):
    (tmp_path / "new").mkdir()
    shutil.move(engine, tmp_path / "new" / "engine")
    shutil.move(checkpoint, tmp_path / "new" / "checkpoint")
    assert read_bundle(tmp_path / "new" / "engine").checkpoint == tmp_path / "new" / "checkpoint"


def test_sharded_checkpoint_is_copied_with_its_index(tmp_path, contents, checkpoint):
    (checkpoint / "model.safetensors").unlink()
    for i in range(2):
        save_file({f"w{i}": torch.ones(2)}, checkpoint / f"s{i}.safetensors")
    index = {"weight_map": {"w0": "s0.safetensors", "w1": "s1.safetensors"}}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    (checkpoint / "unrelated.bin").write_bytes(b"x")
    write_bundle(tmp_path / "e", contents(copy_weights=True))
    assert set(tree(tmp_path / "e" / "weights")) == set(tree(checkpoint)) - {"unrelated.bin"}


def test_weights_from_memory(tmp_path, contents):
    def write(folder):
        (folder / "config.json").write_text(json.dumps(preset_json("nano")))
        save_file({"embed.weight": torch.ones(10, 4)}, folder / "model.safetensors")

    write_bundle(tmp_path / "e", contents(checkpoint=write))
    assert read_bundle(tmp_path / "e").checkpoint == tmp_path / "e" / "weights"


def test_several_parts(tmp_path, contents, part_data):
    parts = [
        PartContents(spec=PartSpec.parse({**part_data, "name": n}), backend="reference") for n in ("A_small", "B_small")
    ]
    write_bundle(tmp_path / "e", contents(parts=parts))
    assert list(read_bundle(tmp_path / "e").parts) == ["A_small", "B_small"]


def test_parts_must_agree_on_weights(tmp_path, contents, part_data):
    other = json.loads(json.dumps(part_data))
    other["name"] = "B"
    other["inputs"][0]["shape"] = [11, 4]
    parts = [PartContents(spec=PartSpec.parse(d), backend="reference") for d in (part_data, other)]
    with pytest.raises(BundleError, match=r"part B: weight embed\.weight differs"):
        write_bundle(tmp_path / "e", contents(parts=parts))
    assert not (tmp_path / "e").exists()


def test_replaces_an_engine(engine, contents):
    first = contents().passes[0]
    other = replace(first, report=first.report.model_copy(update={"name": "other"}))
    write_bundle(engine, contents(passes=[other]))
    assert "passes/00_other.ir" in tree(engine)
    assert "passes/00_canonicalize.ir" not in tree(engine)
    assert not [p for p in engine.parent.iterdir() if p.name.startswith(".")]


def test_fills_an_empty_folder(tmp_path, contents):
    (tmp_path / "e").mkdir()
    write_bundle(tmp_path / "e", contents())
    read_bundle(tmp_path / "e")


def test_saves_onto_itself(tmp_path, contents):
    path = tmp_path / "e"
    write_bundle(path, contents(copy_weights=True))
    with pytest.raises(BundleError, match="save with copy_weights"):
        write_bundle(path, contents(checkpoint=path / "weights"))
    write_bundle(path, contents(checkpoint=path / "weights", copy_weights=True))
    read_bundle(path, full=True)


@pytest.mark.parametrize("copy_weights", [False, True])
def test_linked_weights_are_not_destroyed(tmp_path, contents, checkpoint, copy_weights):
    path, linked = tmp_path / "e", tmp_path / "linked"
    write_bundle(path, contents(copy_weights=True))
    linked.mkdir()
    for file in (path / "weights").iterdir():
        (linked / file.name).symlink_to(file)
    before = tree(tmp_path)
    with pytest.raises(BundleError, match=r"e: holds .*, which .*linked.* links to"):
        write_bundle(path, contents(checkpoint=linked, copy_weights=copy_weights))
    assert tree(tmp_path) == before


@pytest.mark.parametrize("copy_weights", [False, True])
def test_checkpoint_that_changed_since(tmp_path, contents, checkpoint, copy_weights):
    digests = checkpoint_digests(checkpoint)
    write_bundle(tmp_path / "same", contents(digests=digests, copy_weights=copy_weights))
    save_file({"embed.weight": torch.ones(10, 4)}, checkpoint / "model.safetensors")
    with pytest.raises(BundleError, match=r"model\.safetensors: has changed since the model was compiled"):
        write_bundle(tmp_path / "e", contents(digests=digests, copy_weights=copy_weights))
    assert not (tmp_path / "e").exists()


def _file(path):
    path.write_text("mine")


def _foreign_folder(path):
    path.mkdir()
    (path / "thesis.tex").write_text("mine")


def _broken_manifest(path):
    path.mkdir()
    (path / "manifest.json").write_text("{")


@pytest.mark.parametrize("make", [_file, _foreign_folder, _broken_manifest])
def test_refuses_to_replace(tmp_path, contents, make):
    path = tmp_path / "precious"
    make(path)
    before = tree(tmp_path)
    with pytest.raises(BundleError, match="precious"):
        write_bundle(path, contents())
    assert tree(tmp_path) == before


def test_replaces_an_engine_of_another_schema(engine, contents):
    file = engine / "manifest.json"
    data = json.loads(file.read_text())
    del data["cache"]
    file.write_text(json.dumps({**data, "schema": "precede.engine/9"}))
    write_bundle(engine, contents())
    read_bundle(engine)


def test_refuses_places_that_cannot_be_replaced(tmp_path, contents, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for place in (".", "..", "/"):
        with pytest.raises(BundleError, match="is the current directory or holds it"):
            write_bundle(place, contents())
    for place, message in (("/proc/engine", "is in /proc"), ("/dev/shm", "is a mount point")):
        if os.path.ismount(os.path.dirname(place) if "proc" in place else place):
            with pytest.raises(BundleError, match=message):
                write_bundle(place, contents())


def test_refuses_to_replace_an_engine_with_foreign_files(engine, contents):
    (engine / "notes.txt").write_text("mine")
    with pytest.raises(BundleError, match=r"holds notes\.txt, which is no file of the engine"):
        write_bundle(engine, contents())
    assert (engine / "notes.txt").read_text() == "mine"


def test_missing_parent(tmp_path, contents):
    with pytest.raises(BundleError, match="no such directory; make it"):
        write_bundle(tmp_path / "no" / "engine", contents())


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_unwritable_parent(tmp_path, contents):
    parent = tmp_path / "locked"
    parent.mkdir()
    parent.chmod(0o500)
    with pytest.raises(BundleError, match="cannot be written: Permission denied"):
        write_bundle(parent / "engine", contents())


def test_disk_refuses(tmp_path, contents, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(home, "write_synced", full)
    with pytest.raises(BundleError, match="cannot be written: No space left on device"):
        write_bundle(tmp_path / "e", contents())
    assert os.listdir(tmp_path) == ["checkpoint"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize("step", ["_write_part", "_write_pass", "_file_entry", "cache_entry"])
def test_interrupted(tmp_path, contents, monkeypatch, error, there, step):
    if there:
        write_bundle(tmp_path / "e", contents())
    before = tree(tmp_path)

    def interrupt(*args, **kwargs):
        raise error("stop")

    monkeypatch.setattr(home, step, interrupt)
    with pytest.raises(error, match="stop"):
        write_bundle(tmp_path / "e", contents())
    assert tree(tmp_path) == before
    assert sorted(os.listdir(tmp_path)) == ["checkpoint", "e"][: 1 + there]


def test_checkpoint_of_another_config(tmp_path, contents, checkpoint):
    (checkpoint / "config.json").write_text(json.dumps(preset_json("mini")))
    with pytest.raises(BundleError, match="differs from the config of the compiled model"):
        write_bundle(tmp_path / "e", contents())


def test_checkpoint_without_config(tmp_path, contents, checkpoint):
    (checkpoint / "config.json").unlink()
    with pytest.raises(ConfigError, match="no such file"):
        write_bundle(tmp_path / "e", contents())
