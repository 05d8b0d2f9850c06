"""Small checkpoints on disk for the tests: one good nano checkpoint, and broken variants of it."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch

from precede.model.init import init_checkpoint
from precede.model.shards import INDEX_NAME, SINGLE_NAME, find_tensors
from precede.model.storage import read_tensor
from precede.model.writer import safetensors_bytes


@cache
def nano_directory() -> Path:
    """A nano checkpoint, written once a test process; do not modify it."""
    directory = Path(mkdtemp(prefix="nano-")) / "nano"
    init_checkpoint("nano", directory, seed=1)
    return directory


def copy_nano(target: Path) -> Path:
    shutil.copytree(nano_directory(), target)
    return target


def stored_tensors(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint in their stored dtypes."""
    tensors = {}
    for name, extent in find_tensors(directory).items():
        tensor = read_tensor(extent)
        tensors[name] = tensor.view(torch.float8_e8m0fnu) if extent.dtype == "F8_E8M0" else tensor
    return tensors


def write_file(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    path.write_bytes(b"".join(safetensors_bytes(tensors.items())))


def edited_nano(target: Path, edit: Callable[[dict[str, torch.Tensor]], Any]) -> Path:
    """nano as a single file after `edit` changed its tensors in place."""
    copy_nano(target)
    tensors = stored_tensors(target)
    (target / INDEX_NAME).unlink()
    for shard in target.glob("model-*.safetensors"):
        shard.unlink()
    edit(tensors)
    write_file(target / SINGLE_NAME, tensors)
    return target


def edit_header(path: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    """Change the JSON header of a safetensors file in place; its data stays."""
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    edit(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])


def edit_index(directory: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    """Change the weight_map of the index in place."""
    index = json.loads((directory / INDEX_NAME).read_text())
    edit(index["weight_map"])
    (directory / INDEX_NAME).write_text(json.dumps(index))
