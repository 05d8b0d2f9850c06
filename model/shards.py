"""Where each tensor of a checkpoint lies: safetensors headers and the index, read and checked without any data.

A safetensors file is 8 bytes of header length, a JSON header (name -> dtype, shape, [begin, end) in the data), the
data. Accepted are exactly the files whose tensors cover the data without holes or overlap up to the last byte, so a
truncated or concatenated file is noticed before anything is read.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from .errors import CheckpointError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

_ITEM_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "I64": 8,
    "U64": 8,
    "F64": 8,
}
_LONGEST_HEADER = 100_000_000


@dataclass(frozen=True)
class Extent:
    """One stored tensor: dtype as safetensors spells it, shape, file, first byte in the file, length in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    nbytes: int


def find_tensors(directory: Path) -> dict[str, Extent]:
    """All tensors of a checkpoint directory: by its index, or those of its single `model.safetensors`.

    Raises CheckpointError naming the file, and the tensor where there is one.
    """
    if not directory.is_dir():
        raise CheckpointError(f"{directory}: not a directory; a checkpoint is a directory with config.json and shards")
    index = directory / INDEX_NAME
    if index.exists():
        return _read_indexed(index)
    if (directory / SINGLE_NAME).exists():
        return read_header(directory / SINGLE_NAME)
    raise CheckpointError(f"{directory}: holds neither {INDEX_NAME} nor {SINGLE_NAME}")


def read_header(path: Path) -> dict[str, Extent]:
    """The tensors of one safetensors file. Raises CheckpointError for anything but a complete, well-formed file."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            first = file.read(8)
            if len(first) < 8:
                raise CheckpointError(f"{path}: {size} bytes are too few for a safetensors file")
            (length,) = struct.unpack("<Q", first)
            if length > size - 8:
                raise CheckpointError(
                    f"{path}: header length {length} reaches beyond the file's {size} bytes; the file is truncated "
                    "or no safetensors file"
                )
            if length > _LONGEST_HEADER:
                raise CheckpointError(f"{path}: header of {length} bytes, at most {_LONGEST_HEADER} are read")
            text = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    header = _parse_object(path, text, "safetensors header")
    header.pop("__metadata__", None)
    extents = {name: _extent(path, name, entry, 8 + length) for name, entry in header.items()}
    _check_cover(path, extents.values(), 8 + length, size)
    return extents


def _read_indexed(index: Path) -> dict[str, Extent]:
    try:
        text = index.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{index}: cannot be read: {error.strerror}") from None
    weight_map = _parse_object(index, text, "index").get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(f, str) for f in weight_map.values()):
        raise CheckpointError(f"{index}: weight_map must be an object of tensor name to file name")
    for name, file in weight_map.items():
        if file != Path(file).name or "\\" in file or file in ("", ".", ".."):
            raise CheckpointError(f"{index}: {name} is in {file!r}; a shard must be a file name in the same directory")
    found: dict[str, Extent] = {}
    for file in dict.fromkeys(weight_map.values()):
        path = index.parent / file
        if not path.exists():
            name = next(n for n, f in weight_map.items() if f == file)
            raise CheckpointError(f"{path}: no such shard; {index.name} says that it holds {name}")
        for name, extent in read_header(path).items():
            if name in found:
                raise CheckpointError(f"{name} is in two shards, {found[name].file} and {path}; remove one")
            if name not in weight_map:
                raise CheckpointError(f"{path}: holds {name}, which {index.name} does not list")
            found[name] = extent
    for name, file in weight_map.items():
        if name not in found or found[name].file.name != file:
            raise CheckpointError(f"{index.parent / file}: lacks {name}, which {index.name} places there")
    return found


def _parse_object(path: Path, text: bytes, what: str) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        data = dict(pairs)
        if len(data) < len(pairs):
            names = [k for k, _ in pairs]
            twice = next(n for n in names if names.count(n) > 1)
            raise CheckpointError(f"{path}: {what} names {twice} twice")
        return data

    try:
        data = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: {what} is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{path}: {what} is a JSON {type(data).__name__}, expected an object")
    return data


def _extent(path: Path, name: str, entry: Any, base: int) -> Extent:
    if not isinstance(entry, Mapping):
        raise CheckpointError(f"{path}: {name} has a malformed header entry {entry!r}")
    dtype, shape, span = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    well_formed = (
        isinstance(dtype, str) and _are_sizes(shape) and _are_sizes(span) and len(span) == 2  # type: ignore[arg-type]
    )
    if not well_formed:
        raise CheckpointError(f"{path}: {name} has a malformed header entry {dict(entry)!r}")
    if dtype not in _ITEM_BYTES:
        raise CheckpointError(f"{path}: {name} has the unknown dtype {dtype!r}")
    begin, end = span  # type: ignore[misc]
    if end - begin != prod(shape) * _ITEM_BYTES[dtype]:  # type: ignore[arg-type,index]
        raise CheckpointError(f"{path}: {name} is {dtype} {shape} but occupies {end - begin} bytes")
    return Extent(name, dtype, tuple(shape), path, base + begin, end - begin)  # type: ignore[arg-type]


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(v) is int and v >= 0 for v in value)


def _check_cover(path: Path, extents: Any, base: int, size: int) -> None:
    at = base
    for extent in sorted(extents, key=lambda e: (e.offset, e.nbytes)):
        if extent.offset != at:
            raise CheckpointError(
                f"{path}: {extent.name} starts at byte {extent.offset}, expected {at}; data must be gapless"
            )
        at += extent.nbytes
        if at > size:
            raise CheckpointError(f"{path}: truncated: {extent.name} ends at byte {at}, the file has {size}")
    if at != size:
        raise CheckpointError(f"{path}: has {size - at} bytes after its last tensor")
