from __future__ import annotations

import json
import struct

import pytest
import torch
from safetensors.torch import save_file

from precede.model.errors import CheckpointError
from precede.model.shards import INDEX_NAME, SINGLE_NAME, find_tensors, read_header

from .checkpoint_files import edit_header, write_file


@pytest.fixture
def two_tensors(tmp_path):
    path = tmp_path / SINGLE_NAME
    write_file(path, {"a": torch.arange(6, dtype=torch.float32).view(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)})
    return path


def test_header_of_a_good_file(two_tensors):
    found = read_header(two_tensors)
    assert {n: (e.dtype, e.shape, e.nbytes) for n, e in found.items()} == {
        "a": ("F32", (2, 3), 24),
        "b": ("BF16", (4,), 8),
    }
    assert found["b"].offset == found["a"].offset + 24


def test_reads_what_the_safetensors_library_writes(tmp_path):
    save_file({"x": torch.ones(3, 5), "y": torch.zeros(2, dtype=torch.int8)}, tmp_path / "f.safetensors", {"k": "v"})
    assert {n: e.shape for n, e in read_header(tmp_path / "f.safetensors").items()} == {"x": (3, 5), "y": (2,)}


def break_file(path, what):
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    data = raw[8 + length :]
    text = {
        "not JSON": b"{nope",
        "a JSON list": b"[1, 2]",
        "twice": b'{"a": {"dtype":"I8","shape":[1],"data_offsets":[0,1]}, "a": 1}',
        "entry": b'{"a": [1]}',
        "malformed": b'{"a": {"dtype":"I8","shape":[-1],"data_offsets":[0,1]}}',
        "bool": b'{"a": {"dtype":"I8","shape":[true],"data_offsets":[0,1]}}',
        "dtype": b'{"a": {"dtype":"I7","shape":[1],"data_offsets":[0,1]}}',
        "bytes": b'{"a": {"dtype":"I8","shape":[2],"data_offsets":[0,1]}}',
    }
    if what in text:
        path.write_bytes(struct.pack("<Q", len(text[what])) + text[what] + data)
    elif what == "tiny":
        path.write_bytes(b"123")
    elif what == "beyond":
        path.write_bytes(struct.pack("<Q", 10**9) + raw[8:])
    elif what == "truncated":
        path.write_bytes(raw[:-3])
    elif what == "tail":
        path.write_bytes(raw + b"xx")
    elif what == "hole":
        edit_header(path, lambda h: h["b"].update(data_offsets=[26, 34]))
    elif what == "overlap":
        edit_header(path, lambda h: h["b"].update(data_offsets=[20, 28]))


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("not JSON", "safetensors header is not JSON"),
        ("a JSON list", "safetensors header is a JSON list"),
        ("twice", "names a twice"),
        ("entry", "a has a malformed header entry"),
        ("malformed", "a has a malformed header entry"),
        ("bool", "a has a malformed header entry"),
        ("dtype", "a has the unknown dtype 'I7'"),
        ("bytes", r"a is I8 \[2\] but occupies 1 bytes"),
        ("tiny", "3 bytes are too few"),
        ("beyond", "header length 1000000000 reaches beyond the file's"),
        ("truncated", "truncated: b ends at byte"),
        ("tail", "has 2 bytes after its last tensor"),
        ("hole", "b starts at byte .* must be gapless"),
        ("overlap", "b starts at byte .* must be gapless"),
    ],
)
def test_broken_files_are_refused_by_name(two_tensors, what, message):
    break_file(two_tensors, what)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_header(two_tensors)
    assert str(two_tensors) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "index is not JSON"),
        ("[]", "index is a JSON list"),
        ("{}", "weight_map must be an object"),
        ('{"weight_map": {"a": 3}}', "weight_map must be an object"),
        ('{"weight_map": {"a": "../x.safetensors"}}', "a is in '../x.safetensors'; a shard must be a file name"),
        ('{"weight_map": {"a": "/etc/passwd"}}', "a is in '/etc/passwd'"),
        ('{"weight_map": {"a": ".."}}', r"a is in '\.\.'"),
        ('{"weight_map": {"a": "c:\\\\x"}}', "a shard must be a file name"),
        ('{"weight_map": {"a": "gone.safetensors"}}', "no such shard; .* says that it holds a"),
        ('{"weight_map": {"a": "model.safetensors", "b": "model.safetensors", "c": "model.safetensors"}}', "lacks c"),
        ('{"weight_map": {"a": "model.safetensors"}}', "holds b, which .* does not list"),
    ],
)
def test_broken_indexes_are_refused(two_tensors, index, message):
    (two_tensors.parent / INDEX_NAME).write_text(index)
    with pytest.raises(CheckpointError, match=message):
        find_tensors(two_tensors.parent)


def test_a_tensor_in_two_shards_is_refused_with_both_names(two_tensors):
    write_file(two_tensors.with_name("other.safetensors"), {"a": torch.ones(1), "c": torch.ones(1)})
    placed = {"a": SINGLE_NAME, "b": SINGLE_NAME, "c": "other.safetensors"}
    (two_tensors.parent / INDEX_NAME).write_text(json.dumps({"weight_map": placed}))
    with pytest.raises(CheckpointError, match=r"a is in two shards, .*model\.safetensors and .*other\.safetensors"):
        find_tensors(two_tensors.parent)


def test_a_directory_without_weights_and_no_directory(tmp_path):
    with pytest.raises(CheckpointError, match=f"neither {INDEX_NAME} nor {SINGLE_NAME}"):
        find_tensors(tmp_path)
    with pytest.raises(CheckpointError, match="not a directory"):
        find_tensors(tmp_path / "absent")
