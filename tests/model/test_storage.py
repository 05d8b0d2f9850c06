from __future__ import annotations

import json
import struct
import subprocess
import sys

import pytest
import torch

from precede.model.errors import CheckpointError
from precede.model.shards import Extent, read_header
from precede.model.storage import ALIGNMENT, aligned_empty, one_thread, read_tensor

from .checkpoint_files import write_file


@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (0, 4), (1000, 33)])
def test_aligned_empty(shape):
    for dtype in (torch.float32, torch.bfloat16, torch.uint8):
        tensor = aligned_empty(shape, dtype)
        assert tensor.data_ptr() % ALIGNMENT == 0
        assert (tuple(tensor.shape), tensor.dtype) == (shape, dtype)


def test_unaligned_data_is_read_into_aligned_storage(tmp_path):
    path = tmp_path / "odd.safetensors"
    header = json.dumps(
        {
            "a": {"dtype": "I8", "shape": [3], "data_offsets": [0, 3]},
            "b": {"dtype": "F32", "shape": [2], "data_offsets": [3, 11]},
        }
    ).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"\x01\x02\xff" + struct.pack("<2f", 1.5, -2.0))
    found = read_header(path)
    assert read_tensor(found["a"]).tolist() == [1, 2, -1]
    assert read_tensor(found["b"]).tolist() == [1.5, -2.0]
    assert read_tensor(found["b"]).data_ptr() % ALIGNMENT == 0


def test_scales_are_read_as_bytes(tmp_path):
    scales = torch.arange(256, dtype=torch.uint8)
    write_file(tmp_path / "s.safetensors", {"x.scale": scales.view(torch.float8_e8m0fnu)})
    assert torch.equal(read_tensor(read_header(tmp_path / "s.safetensors")["x.scale"]), scales)


def test_a_file_that_disappears_is_one_error(tmp_path):
    with pytest.raises(CheckpointError, match="x cannot be read: No such file"):
        read_tensor(Extent("x", "I8", (1,), tmp_path / "gone", 0, 1))


# Run in a process of its own: the peak of resident memory is a process's, and never goes down.
GATHER = """
import resource, sys, warnings
import torch
from pathlib import Path
import precede.model.ops.engram
from precede.model.shards import read_header
from precede.model.storage import map_tensor

warnings.simplefilter("error")
found = read_header(Path(sys.argv[1]))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
weight, scale = map_tensor(found["embed.weight"]), map_tensor(found["embed.scale"])
rows = torch.tensor([[0, weight.shape[0] // 2, weight.shape[0] - 1]])
values = torch.ops.precede.engram_gather(weight, scale, rows, torch.float32)
print(values[0, ::256].tolist(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_a_table_larger_than_memory_is_gathered_from(tmp_path):
    rows = 60 * 2**30 // 256
    path = tmp_path / "table.safetensors"
    entries = {
        "embed.weight": {"dtype": "F8_E4M3", "shape": [rows, 256], "data_offsets": [0, rows * 256]},
        "embed.scale": {"dtype": "F8_E8M0", "shape": [rows, 8], "data_offsets": [rows * 256, rows * 264]},
    }
    header = json.dumps(entries).encode()
    start = 8 + len(header)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(start + rows * 264)
        for row, code, byte in ((0, 0x38, 127), (rows // 2, 0x40, 128), (rows - 1, 0x38, 130)):  # 1.0, 2.0, 1.0
            file.seek(start + row * 256)
            file.write(bytes([code]))
            file.seek(start + rows * 256 + row * 8)
            file.write(bytes([byte]))
    assert path.stat().st_size > 60 * 2**30
    run = subprocess.run([sys.executable, "-c", GATHER, path], capture_output=True, text=True, check=True)
    values, grown = run.stdout.rsplit("]", 1)
    assert json.loads(values + "]") == [1.0, 4.0, 8.0]
    assert int(grown) < 64 * 1024  # KiB


def test_one_thread_is_undone_after_an_error():
    before = torch.get_num_threads()
    inside = []

    def fail():
        with one_thread():
            inside.append(torch.get_num_threads())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert inside == [1]
    assert torch.get_num_threads() == before
