"""Broken engines: each fault is refused with what was expected and found, before anything is used."""

import hashlib
import json
import re
import shutil

import pytest
import torch
from safetensors.torch import save_file

from precede.lowering.bundle import read_bundle, write_bundle
from precede.lowering.errors import BackendUnavailable, BundleError, EngineMismatch
from precede.lowering.manifest import fingerprint
from precede.model.config import preset_json
from precede.model.errors import ConfigError


def edit(engine, change):
    """Change the manifest's JSON."""
    file = engine / "manifest.json"
    data = json.loads(file.read_text())
    change(data)
    file.write_text(json.dumps(data))


def replace(engine, name, data):
    """Change a file and its entry in the manifest, as somebody with an editor would."""
    (engine / name).write_bytes(data)
    entry = {"path": name, "size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    edit(engine, lambda m: m.update(files=[entry if f["path"] == name else f for f in m["files"]]))


def replace_json(engine, name, change):
    data = json.loads((engine / name).read_text())
    change(data)
    replace(engine, name, json.dumps(data).encode())


def unlink(name):
    return lambda engine: (engine / name).unlink()


def rewrite(name, text):
    return lambda engine: (engine / name).write_text(text)


def truncate(name):
    return lambda engine: (engine / name).write_bytes((engine / name).read_bytes()[:-3])


def flip(name):
    def change(engine):
        data = bytearray((engine / name).read_bytes())
        data[len(data) // 2] ^= 1
        (engine / name).write_bytes(data)

    return change


def manifest(change):
    return lambda engine: edit(engine, change)


def options(**values):
    """Change the options and their fingerprint."""

    def change(data):
        data["options"]["values"].update(values)
        data["options"]["fingerprint"] = fingerprint(data["options"]["values"])

    return manifest(change)


def listed_as(name):
    return manifest(lambda m: m["files"][0].update(path=name))


def link_out(engine):
    outside = engine.parent / "outside.ir"
    shutil.move(engine / "parts" / "main.ir", outside)
    (engine / "parts" / "main.ir").symlink_to(outside)


def unknown_operator(engine):
    replace_json(engine, "parts/main.json", lambda p: p["nodes"][0].update(target="aten.launch_missiles.default"))


def other_weight_shape(engine):
    def change(part):
        part["inputs"][0]["shape"] = [11, 4]

    replace_json(engine, "parts/main.json", change)
    edit(engine, lambda m: m["parts"][0]["inputs"][0].update(shape=[11, 4]))


FAULTS = {
    "no manifest": (unlink("manifest.json"), BundleError, "manifest.json: no such file"),
    "empty manifest": (rewrite("manifest.json", ""), BundleError, "not JSON"),
    "manifest no JSON": (truncate("manifest.json"), BundleError, "not JSON"),
    "manifest no object": (rewrite("manifest.json", "[]"), BundleError, "no engine of precede"),
    "newer schema": (manifest(lambda m: m.update(schema="precede.engine/7")), EngineMismatch, "precede.engine/7"),
    "extra key": (manifest(lambda m: m.update(postinstall="x")), BundleError, "postinstall is not a key"),
    "missing key": (manifest(lambda m: m.pop("cache")), BundleError, "cache is missing"),
    "missing part": (unlink("parts/main.json"), BundleError, "main.json: no such file"),
    "missing config": (unlink("config.json"), BundleError, "config.json: no such file"),
    "truncated part": (truncate("parts/main.json"), BundleError, "bytes, expected"),
    "changed part": (flip("parts/main.json"), BundleError, "SHA-256"),
    "changed diff": (flip("passes/00_canonicalize.diff"), BundleError, "SHA-256"),
    "path up": (listed_as("../checkpoint/config.json"), BundleError, "is not allowed"),
    "absolute path": (listed_as("/etc/hostname"), BundleError, "is not allowed"),
    "backslashes": (listed_as("..\\x"), BundleError, "is not allowed"),
    "link out": (link_out, BundleError, "outside the engine folder"),
    "listed twice": (manifest(lambda m: m["files"].append(m["files"][0])), BundleError, "twice"),
    "unlisted part": (manifest(lambda m: m["parts"][0].update(file="parts/b.json")), BundleError, "not in the list"),
    "part outside": (manifest(lambda m: m["parts"][0].update(file="../x.json")), BundleError, "not in the list"),
    "unknown target": (manifest(lambda m: m.update(target="sm_13")), EngineMismatch, "'sm_13', known are cpu"),
    "other backend": (manifest(lambda m: m.update(backend="tensorrt")), BackendUnavailable, "'tensorrt'"),
    "unknown operator": (unknown_operator, BundleError, "aten.launch_missiles.default"),
    "part no JSON": (lambda e: replace(e, "parts/main.json", b"{"), BundleError, "main.json: not JSON"),
    "renamed part": (
        lambda e: replace_json(e, "parts/main.json", lambda p: p.update(name="other")),
        BundleError,
        "name differ from the manifest",
    ),
    "fewer nodes": (
        lambda e: replace_json(e, "parts/main.json", lambda p: p["nodes"].pop()),
        BundleError,
        "node count differ",
    ),
    "other symbols": (manifest(lambda m: m.update(symbols={"T": [1, 9]})), BundleError, "symbols differ"),
    "edited config": (manifest(lambda m: m["model"]["config"].update(hidden_size=1)), BundleError, "fingerprint"),
    "edited options": (manifest(lambda m: m["options"]["values"].update(page_size=1)), BundleError, "fingerprint"),
    "config of another model": (
        lambda e: replace(e, "config.json", json.dumps(preset_json("mini")).encode()),
        EngineMismatch,
        "the engine was compiled for",
    ),
    "config no model": (lambda e: replace(e, "config.json", b"{}"), ConfigError, "config.json"),
    "other cache size": (manifest(lambda m: m["cache"].update(page_bytes=1)), EngineMismatch, "page_bytes is 1"),
    "page size that splits groups": (manifest(lambda m: m["cache"].update(page_size=3)), ConfigError, "page_size = 3"),
    "edited store": (manifest(lambda m: m["cache"]["latent"].update(quantiser="fp8")), EngineMismatch, "cache latent"),
    "edited dtype": (manifest(lambda m: m["cache"]["window"].update(dtype="int8")), EngineMismatch, "cache window"),
    "edited bytes": (manifest(lambda m: m["cache"].update(bytes_per_token=1.5)), EngineMismatch, "bytes_per_token"),
    "edited numerics": (manifest(lambda m: m["numerics"].update(act_quant=True)), BundleError, "options say exact32"),
    "edited sums": (
        manifest(lambda m: m["numerics"].update(gemm_accumulate="float64")),
        BundleError,
        "options say exact32",
    ),
    "other options": (options(page_size=32), BundleError, "page_size is 16, its options say 32"),
    "odd numerics": (options(numerics={}), BundleError, "is neither a preset"),
    "GPU target": (manifest(lambda m: m.update(target="sm_90")), EngineMismatch, "for cpu only"),
    "long integer": (rewrite("manifest.json", '{"a": ' + "9" * 5000 + "}"), BundleError, "not JSON"),
    "deep": (rewrite("manifest.json", "[" * 100_000), BundleError, "not JSON"),
    "NaN": (rewrite("manifest.json", '{"a": NaN}'), BundleError, "'NaN' is no JSON number"),
    "infinity": (rewrite("manifest.json", '{"a": 1e999}'), BundleError, "'1e999' is no JSON number"),
    "weight not listed": (manifest(lambda m: m.update(weights=[])), BundleError, "embed.weight"),
    "weight of another shape": (other_weight_shape, BundleError, "[11, 4]"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_broken_engine(engine, fault):
    change, error, message = FAULTS[fault]
    read_bundle(engine)
    change(engine)
    with pytest.raises(error, match=re.escape(message)) as caught:
        read_bundle(engine)
    assert "\n" not in str(caught.value)


def test_no_folder(tmp_path):
    with pytest.raises(BundleError, match="no such folder"):
        read_bundle(tmp_path / "nothing")


def checkpoint_tensor(checkpoint, **tensors):
    save_file(tensors, checkpoint / "model.safetensors")


CHECKPOINT_FAULTS = {
    "moved": (lambda c: c.rename(c.with_name("away")), "its checkpoint is not at"),
    "shard missing": (lambda c: (c / "model.safetensors").unlink(), "no such file"),
    "other tensor size": (lambda c: checkpoint_tensor(c, **{"embed.weight": torch.ones(11, 4)}), "bytes"),
    "other dtype": (lambda c: checkpoint_tensor(c, **{"embed.weight": torch.ones(10, 4).int()}), "header"),
    "other name": (lambda c: checkpoint_tensor(c, **{"embad.weight": torch.ones(10, 4)}), "header"),
    "other tokenizer": (lambda c: (c / "tokenizer.json").write_text("[]"), "tokenizer.json: contents"),
    "other config": (
        lambda c: (c / "config.json").write_text(json.dumps(preset_json("mini"))),
        "the engine was compiled for",
    ),
}


@pytest.mark.parametrize("fault", CHECKPOINT_FAULTS)
def test_broken_checkpoint(engine, checkpoint, fault):
    change, message = CHECKPOINT_FAULTS[fault]
    change(checkpoint)
    with pytest.raises(EngineMismatch, match=re.escape(message)):
        read_bundle(engine)


def test_moved_checkpoint_can_be_named(engine, checkpoint, tmp_path):
    checkpoint.rename(tmp_path / "away")
    assert read_bundle(engine, checkpoint=tmp_path / "away").checkpoint == tmp_path / "away"
    with pytest.raises(EngineMismatch, match=r"is not at .*nowhere"):
        read_bundle(engine, checkpoint=tmp_path / "nowhere")


def test_same_headers_with_other_values(engine, checkpoint):
    checkpoint_tensor(checkpoint, **{"embed.weight": torch.ones(10, 4)})
    with pytest.raises(EngineMismatch, match=r"model\.safetensors: contents have SHA-256"):
        read_bundle(engine)
    with pytest.raises(EngineMismatch, match=r"model\.safetensors: contents have SHA-256"):
        read_bundle(engine, checkpoint=checkpoint)


def test_the_first_place_that_fits_is_taken(tmp_path, engine, checkpoint):
    shutil.copytree(engine, tmp_path / "B" / "engine")
    near = tmp_path / "B" / "checkpoint"
    near.mkdir()
    assert read_bundle(tmp_path / "B" / "engine").checkpoint == checkpoint
    shutil.copytree(checkpoint, near, dirs_exist_ok=True)
    assert read_bundle(tmp_path / "B" / "engine").checkpoint == near
    checkpoint_tensor(near, **{"embed.weight": torch.ones(10, 4)})
    assert read_bundle(tmp_path / "B" / "engine").checkpoint == checkpoint
    (checkpoint / "tokenizer.json").write_text("[]")
    with pytest.raises(EngineMismatch, match=r"B/checkpoint/model\.safetensors: .*checkpoint/tokenizer\.json: "):
        read_bundle(tmp_path / "B" / "engine")


def test_sampled_reading_notices_changed_copied_weights(tmp_path, contents):
    path = tmp_path / "e"
    write_bundle(path, contents(copy_weights=True))
    file = path / "weights" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(EngineMismatch, match=r"model.safetensors: contents have SHA-256"):
        read_bundle(path)
    with pytest.raises(BundleError, match=r"model.safetensors: contents have SHA-256"):
        read_bundle(path, full=True)


@pytest.mark.parametrize("version", ["2.10.1", "2.15.0", "3.0.0", "nonsense"])
def test_unsupported_torch(engine, monkeypatch, version):
    monkeypatch.setattr(torch, "__version__", version)
    with pytest.raises(EngineMismatch, match=rf"torch {version} is installed, engines run on 2\.11"):
        read_bundle(engine)


@pytest.mark.parametrize("version", ["2.11.0+cu130", "2.14.1"])
def test_reference_runs_on_any_supported_torch(engine, monkeypatch, version):
    edit(engine, lambda m: m["versions"].update(torch="2.12.1"))
    monkeypatch.setattr(torch, "__version__", version)
    assert read_bundle(engine).manifest.versions.torch == "2.12.1"


def test_compiled_code_needs_the_torch_that_compiled_it(engine, monkeypatch):
    edit(engine, lambda m: m["parts"][0].update(backend="inductor"))
    edit(engine, lambda m: m["versions"].update(torch="2.12.0"))
    monkeypatch.setattr(torch, "__version__", "2.13.0+cpu")
    with pytest.raises(EngineMismatch, match=r"compiled with torch 2\.12\.0, installed is 2\.13\.0\+cpu"):
        read_bundle(engine)
