import json
from pathlib import Path

import pytest

from precede.lowering import manifest as home
from precede.lowering.bundle import write_bundle
from precede.lowering.errors import BundleError, EngineMismatch
from precede.lowering.manifest import Manifest, fingerprint, json_schema


def test_schema_file_is_in_step():
    """Write it again with `manifest.json_schema()` when the classes change on purpose."""
    assert Path(home.__file__).with_name("manifest.schema.json").read_text() == json_schema()


def test_round_trip(engine):
    text = (engine / "manifest.json").read_text()
    assert Manifest.parse(text).to_json() == text


def test_equal_contents_give_equal_manifests(tmp_path, contents):
    first, second = (write_bundle(tmp_path / "out" / n, contents()) for n in _folders(tmp_path / "out"))
    assert first == second


def _folders(parent: Path):
    parent.mkdir()
    return ("a", "b")


def test_fingerprint_ignores_key_order():
    assert fingerprint({"a": 1, "b": [2]}) == fingerprint({"b": [2], "a": 1}) != fingerprint({"a": 1, "b": [3]})


@pytest.mark.parametrize("text", ["{}", "[]", '{"schema": 1}', '{"schema": "other/1"}'])
def test_not_ours(text):
    with pytest.raises(BundleError, match="this is no engine of precede"):
        Manifest.parse(text)


def test_newer_schema_says_what_to_do():
    with pytest.raises(EngineMismatch, match=r"'precede.engine/2', this version reads 'precede.engine/1'; compile"):
        Manifest.parse('{"schema": "precede.engine/2", "new": 1}')


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.update(surprise=1), "surprise is not a key"),
        (lambda m: m["parts"][0].update(command="rm"), "command is not a key"),
        (lambda m: m.pop("weights"), "weights is missing"),
        (lambda m: m.update(parts=[]), "parts"),
        (lambda m: m["files"][0].update(size="12"), "size"),
        (lambda m: m["files"][0].update(sha256="abc"), "sha256"),
        (lambda m: m["checkpoint"]["files"][0].update(name="../x"), "checkpoint.files[0]"),
        (lambda m: m["numerics"].update(compute="float16"), "numerics.compute"),
    ],
)
def test_malformed(engine, change, message):
    data = json.loads((engine / "manifest.json").read_text())
    change(data)
    with pytest.raises(BundleError) as caught:
        Manifest.parse(json.dumps(data))
    assert message in str(caught.value)
