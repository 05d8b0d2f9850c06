"""Everything that users get wrong: exit code 2, one line that names the culprit, nothing half-written.

`invoke(..., code=2)` checks the code, the single line and the absent traceback for every case.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import precede.lowering.bundle as bundle
import precede.model.writer as writer
from precede.cli import app

from .conftest import invoke

Words = list[Any]


def names(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")}


def refused(folder: Path, words: Words, message: str) -> None:
    """The command fails with this message and leaves `folder` as it was."""
    before = names(folder)
    line = invoke(*words, code=2).stderr
    assert message in line, line
    assert names(folder) == before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["bogus"], "No such command 'bogus'; see 'precede --help'"),
        (["--bogus"], "No such option: --bogus"),
        (["init", "nano"], "Missing option '--output'"),
        (["init", "nano", "-o", "x", "--seed", "-1"], "Invalid value for '--seed'"),
        (["init", "nano", "-o", "x", "--seed", "abc"], "Invalid value for '--seed'"),
        (["init", "micro", "-o", "x"], "micro: neither a preset (nano, mini, slice, published) nor a file"),
        (["compile"], "either a checkpoint directory or --config FILE --fake"),
        (["compile", "ckpt", "--config", "c.json", "--fake"], "either a checkpoint directory or --config"),
        (["compile", "ckpt"], "give -o DIR for the engine folder"),
        (["compile", "ckpt", "-o", "x", "--fake"], "--config and --fake go together"),
        (["compile", "--config", "c.json"], "--config and --fake go together"),
        (["compile", "--config", "c.json", "--fake", "-o", "x"], "-o cannot be used with --fake"),
        (["compile", "--config", "c.json", "--fake"], "c.json: no such file"),
        (["compile", "ckpt", "-o", "x", "--page-size", "big"], "Invalid value for '--page-size'"),
        (["compile", "ckpt", "-o", "x", "--page-size", "0"], "page_size = 0; it takes an integer of at least 1"),
        (["compile", "ckpt", "-o", "x", "--numerics", "int8"], "numerics 'int8' is unknown"),
        (["compile", "ckpt", "-o", "x", "--numerics", "bf16,maybe,on"], "--numerics 'bf16,maybe,on': give a preset"),
        (["compile", "ckpt", "-o", "x", "--kv-format", "int4"], "kv_format = 'int4'; choose one of"),
        (["compile", "ckpt", "-o", "x", "--backend", "onnx"], "backend = 'onnx'; choose one of"),
        (["compile", "ckpt", "-o", "x", "--backend", "inductor"], "backend inductor is unavailable"),
        (["compile", "ckpt", "-o", "x", "--backend", "tensorrt"], "backend tensorrt is unavailable"),
        (["compile", "ckpt", "-o", "x", "--target", "sm_80"], "target = 'sm_80'; choose one of"),
        (["compile", "ckpt", "-o", "x", "--target", "sm_90"], "target = 'sm_90' is not implemented"),
        (["compile", "ckpt", "-o", "x", "--tensor-parallel", "4"], "tensor_parallel = 4 is not implemented"),
        (["compile", "ckpt", "-o", "x", "--late-start", "cut+1"], "late_start = 'cut+1' is not implemented"),
        (["compile", "ckpt", "-o", "x", "--verify", "hard"], "verify = 'hard'; choose one of"),
        (["compile", "ckpt", "-o", "x", "--disable", "megagate"], "disable names 'megagate', which is no pass"),
        (["compile", "ckpt", "-o", "x", "--stop-after", "end"], "stop_after names 'end', which is no pass"),
        (["compile", "ckpt", "-o", "x"], "ckpt: "),
        (["compile", "ckpt", "-o", "a/b"], "a: no such directory"),
        (["compile", "ckpt", "-o", "x", "--json", "no/r.json"], "no/r.json: the directory no does not exist"),
        (["compile", "ckpt", "-o", "x", "--json", "."], ".: is a directory"),
        (["inspect"], "either an engine folder or --checkpoint-table"),
        (["inspect", "e", "--checkpoint-table", "c.json"], "either an engine folder or --checkpoint-table"),
        (["inspect", "e"], "e: no such folder"),
        (["inspect", "e", "--pass", "p", "--json", "f"], "--pass prints a diff and --json writes the report"),
        (["inspect", "--checkpoint-table", "c.json", "--json", "f"], "--checkpoint-table prints a table only"),
        (["inspect", "--checkpoint-table", "c.json", "--pass", "p"], "--checkpoint-table prints a table only"),
        (["inspect", "--checkpoint-table", "c.json", "--checkpoint", "d"], "--checkpoint-table prints a table only"),
        (["compile", "--config", "c.json", "--fake", "--copy-weights"], "--copy-weights cannot be used with --fake"),
        (["compile", "en\udcff", "-o", "x"], "argument 'en\\udcff': is not UTF-8"),
        (["generate", "e", "--prompt", "\udcff"], "argument '\\udcff': is not UTF-8"),
        (["inspect", "--checkpoint-table", "c.json"], "c.json: no such file"),
        (["generate", "e"], "give at least one --prompt TEXT or --token-ids IDS"),
        (["generate", "e", "--prompt", "x"], "e: no such folder"),
        (["generate", "e", "--token-ids", "1,x"], "--token-ids '1,x': give integers"),
        (["generate", "e", "--prompt", "x", "--max-tokens", "0"], "max_tokens = 0; it takes an integer of at least 1"),
        (["generate", "e", "--prompt", "x", "--temperature", "-1"], "temperature = -1.0; it takes a number"),
        (["generate", "e", "--prompt", "x", "--temperature", "nan"], "temperature = nan; it takes a number"),
        (["generate", "e", "--prompt", "x", "--top-p", "0"], "top_p = 0.0; it takes a number"),
        (["generate", "e", "--prompt", "x", "--top-k", "-2"], "top_k = -2; it takes an integer"),
        (["generate", "e", "--prompt", "x", "--stop", ""], "stop = ['']; it takes strings"),
        (["generate", "e", "--prompt", "x", "--beams", "4"], "No such option: --beams"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_words(words: Words, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    refused(tmp_path, words, message)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda text: text.pop("hidden_size"), "hidden_size is missing"),
        (lambda text: text.update(hidden_size="64"), "hidden_size must be an integer, got '64'"),
        (lambda text: text.update(hidden_size=-64), "hidden_size must be positive"),
        (lambda text: text.update(hidden_act="gelu"), "hidden_act is 'gelu'"),
        (lambda text: text.update(compress_ratios=[0, 3, 1]), "compress_ratios[1] is 3"),
        (lambda text: text.update(compress_ratios=[0, 2]), "compress_ratios has 2 entries"),
        (lambda text: text.update(kv_source_layer_ids=[2, 1]), "kv_source_layer_ids must be strictly ascending"),
        (lambda text: text.update(kv_source_layer_ids=[]), "kv_source_layer_ids is empty"),
        (lambda text: text.update(vocab_size=100), "vocab"),
    ],
)
def test_malformed_configs(
    edit: Callable[[dict[str, Any]], Any], message: str, tiny_config: Path, tmp_path: Path
) -> None:
    data = json.loads(tiny_config.read_text())
    edit(data["text_config"])
    path = tmp_path / "config.json"
    path.write_text(json.dumps(data))
    refused(tmp_path, ["init", path, "-o", tmp_path / "out"], message)


@pytest.mark.parametrize(
    ("text", "message"), [("{", "not JSON"), ("[]", "expected an object"), ("\udcff", "cannot be")]
)
def test_config_files_that_are_no_config(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    for words in (["init", path, "-o", tmp_path / "out"], ["inspect", "--checkpoint-table", path]):
        refused(tmp_path, words, message)
    refused(tmp_path, ["compile", "--config", path, "--fake"], message)


def truncate(folder: Path) -> None:
    shard = next(folder.glob("model-*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-100])


def drop_token_map(folder: Path) -> None:
    (folder / "engram_token_map.safetensors").unlink()
    (folder / "tokenizer.json").unlink()


def edit_index(folder: Path, edit: Callable[[dict[str, str]], Any]) -> None:
    path = folder / "model.safetensors.index.json"
    data = json.loads(path.read_text())
    edit(data["weight_map"])
    path.write_text(json.dumps(data))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, "model-00001-of-00001.safetensors"),
        (drop_token_map, "engram_token_map.safetensors"),
        (lambda f: (f / "config.json").unlink(), "config.json: no such file"),
        (lambda f: (f / "model.safetensors.index.json").write_text("{"), "model.safetensors.index.json"),
        (lambda f: next(f.glob("model-*.safetensors")).unlink(), "model-00001-of-00001.safetensors"),
        (lambda f: edit_index(f, lambda m: m.update({"head.weight": "../x.safetensors"})), "../x.safetensors"),
        (lambda f: (f / "config.json").write_text("{}"), "config.json: "),
    ],
    ids=[
        "truncated shard",
        "no token map",
        "no config",
        "broken index",
        "missing shard",
        "path traversal",
        "empty config",
    ],
)
def test_broken_checkpoints(damage: Callable[[Path], Any], message: str, tiny_checkpoint: Path, tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(tiny_checkpoint, checkpoint)
    damage(checkpoint)
    refused(tmp_path, ["compile", checkpoint, "-o", tmp_path / "engine"], message)


def test_places_where_no_checkpoint_can_go(tiny_config: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_text("mine")
    refused(tmp_path, ["init", tiny_config, "-o", tmp_path / "file"], "is a file")
    refused(tmp_path, ["init", tiny_config, "-o", tmp_path / "folder"], "is not empty")
    refused(tmp_path, ["init", tiny_config, "-o", tmp_path / "file" / "x"], "file")


def test_places_where_no_engine_can_go(tiny_checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_text("mine")
    for place, message in (("file", "is a file"), ("folder", "is no engine"), ("file/x", "no such directory")):
        refused(tmp_path, ["compile", tiny_checkpoint, "-o", tmp_path / place], message)
    assert (tmp_path / "folder" / "file").read_text() == "mine"


def test_options_that_do_not_fit_the_checkpoint(tiny_checkpoint: Path, tmp_path: Path) -> None:
    words = ["compile", tiny_checkpoint, "-o", tmp_path / "engine"]
    refused(tmp_path, [*words, "--page-size", 7], "page_size = 7 must be a positive multiple")
    refused(tmp_path, words, "page_size = 128 is too large for a model of 64 positions")
    refused(tmp_path, [*words, "--numerics", "exact32", "--kv-format", "fp8"], "kv_format = 'fp8' needs kv_quant")


def test_interrupted_init_leaves_nothing(tiny_config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writer, "_write_index", full)
    refused(tmp_path, ["init", tiny_config, "-o", tmp_path / "out"], "out: cannot be written: No space left on device")

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(writer, "_write_index", interrupted)
    refused(tmp_path, ["init", tiny_config, "-o", tmp_path / "out"], "interrupted; what was not finished")
    assert names(tmp_path) == set()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, tiny_engine: Path, tiny_checkpoint: Path) -> None:
    """`compile` that saves the session's engine again instead of capturing for every fault of saving."""
    from precede.inspection import SavedEngine
    from precede.lowering.bundle import EngineContents, PartContents, write_bundle

    saved = SavedEngine.open(tiny_engine)
    b = saved.bundle

    class Compiled:
        def save(self, path: Path, *, copy_weights: bool) -> None:
            contents = EngineContents(
                target="cpu",
                backend="reference",
                config=b.config,
                numerics=b.numerics,
                options=b.manifest.options.values,
                layout=b.layout,
                kv_format="auto",
                store="values",
                parts=[PartContents(spec=b.parts["main"], backend="reference", text="")],
                checkpoint=tiny_checkpoint,
                copy_weights=copy_weights,
            )
            write_bundle(path, contents)

        def report(self) -> object:
            return saved.report()

    monkeypatch.setattr("precede.compile.compile_model", lambda *_, **__: Compiled())


@pytest.mark.usefixtures("quick")
def test_interrupted_save_leaves_the_old_engine(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["compile", tiny_checkpoint, "-o", tmp_path / "engine", "--copy-weights"]
    invoke(*words, code=0)
    before = {p: p.read_bytes() for p in (tmp_path / "engine").rglob("*") if p.is_file()}

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(bundle, "_write_part", full)
    refused(tmp_path, words, "engine: cannot be written: No space left on device")
    monkeypatch.setattr(bundle, "_write_part", interrupted)
    refused(tmp_path, words, "interrupted; what was not finished")
    assert {p: p.read_bytes() for p in (tmp_path / "engine").rglob("*") if p.is_file()} == before
    assert [p.name for p in tmp_path.iterdir()] == ["engine"]


def rewrite(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda e: (e / "manifest.json").unlink(), "manifest.json: no such file"),
        (lambda e: (e / "manifest.json").write_text("{"), "manifest.json: "),
        (lambda e: rewrite(e / "manifest.json", "precede.engine/1", "precede.engine/9"), "precede.engine/9"),
        (lambda e: (e / "parts" / "main.json").unlink(), "parts/main.json: no such file"),
        (
            lambda e: rewrite(e / "parts" / "main.json", "aten.add", "aten.sub"),
            "parts/main.json: contents have SHA-256",
        ),
        (lambda e: (e / "parts" / "main.json").write_text("{}"), "parts/main.json: 2 bytes, expected"),
        (lambda e: rewrite(e / "manifest.json", "parts/main.json", "../../main.json"), "main.json"),
        (lambda e: rewrite(e / "manifest.json", '"target": "cpu"', '"target": "tpu"'), "target 'tpu'"),
        (lambda e: rewrite(e / "manifest.json", '"page_size": 16', '"page_size": 32'), "the manifest was edited"),
    ],
)
def test_broken_engines(damage: Callable[[Path], Any], message: str, tiny_engine: Path, tmp_path: Path) -> None:
    engine = tmp_path / "engine"
    shutil.copytree(tiny_engine, engine)
    damage(engine)
    for words in (["inspect", engine], ["generate", engine, "--prompt", "x"]):
        refused(tmp_path, words, message)


def test_an_engine_whose_checkpoint_is_gone(tiny_engine: Path, tmp_path: Path) -> None:
    engine = tmp_path / "engine"
    shutil.copytree(tiny_engine, engine)
    manifest = engine / "manifest.json"
    data = json.loads(manifest.read_text())
    data["checkpoint"].update(path="/nowhere/ckpt", relative="../nowhere")
    manifest.write_text(json.dumps(data))
    refused(tmp_path, ["generate", engine, "--prompt", "x"], "its checkpoint is not at")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["generate", "--prompt", ""], "prompt 0 is empty"),
        (["generate", "--prompt", "x", "--prompt", ""], "prompt 1 is empty"),
        (["generate", "--token-ids", "5,512"], "prompt 0: token id 512 is outside the vocabulary of 512"),
        (["generate", "--token-ids", "-1"], "token id -1 is outside the vocabulary"),
        (["generate", "--prompt", "x" * 64], "prompt 0 has 64 tokens; the model has 64 positions"),
        (["inspect", "--pass", "nosuch"], "no pass 'nosuch' ran; there are canonicalize, mega_gate"),
        (["inspect", "--json", "no/r.json"], "no/r.json: the directory no does not exist"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_requests(
    words: Words, message: str, tiny_engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    refused(tmp_path, [words[0], tiny_engine, *words[1:]], message)


def test_a_fault_of_ours_is_not_dressed_up_as_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    def broken(*_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("precede.commands.print_checkpoint_table", broken)
    result = CliRunner().invoke(app, ["inspect", "--checkpoint-table", "c.json"])
    assert isinstance(result.exception, RuntimeError)
