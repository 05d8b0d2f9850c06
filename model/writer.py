"""Write checkpoints in the published layout: shards, index, config; all of it or nothing.

Tensors arrive one by one and leave shard by shard, so memory holds one shard and one tensor. Everything is written to
a temporary directory beside the target, compared with the tensor table, and renamed at the end: an interrupted or
failed save leaves nothing under the target's name.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from .checkpoint import CONFIG_NAME
from .config import ModelConfig
from .contents import check_contents
from .errors import CheckpointError
from .formats import encode_fp4, encode_fp8, encode_rows
from .shards import INDEX_NAME, Extent
from .storage import one_thread
from .table import TensorSpec, tensor_table
from .tokens import TOKENIZER_NAME

SHARD_BYTES = 1 << 30

_DTYPES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.int8: "I8",
    torch.int32: "I32",
}

Named = tuple[str, torch.Tensor]


def write_checkpoint(
    directory: str | Path,
    tensors: Iterable[Named],
    config_json: Mapping[str, Any],
    *,
    files: Mapping[str, bytes] | None = None,
    shard_bytes: int = SHARD_BYTES,
    overwrite: bool = False,
) -> None:
    """Write `tensors` (name, tensor as stored: scales float8_e8m0fnu, FP4 int8) as a checkpoint directory.

    `files` are further files by name (tokenizer, token map). Raises CheckpointError for a target that is not empty
    (unless `overwrite`, and then only if it holds nothing but a checkpoint), for a place that cannot be written, and
    for tensors that do not fit the config; nothing is left behind then.
    """
    directory = Path(directory).absolute()
    table = tensor_table(ModelConfig.from_dict(config_json))
    check_target(directory, overwrite=overwrite)
    temporary: Path | None = None
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{directory.name}.partial-", dir=directory.parent))
        with one_thread():
            extents = _write_shards(temporary, tensors, shard_bytes)
        check_contents(table, extents, directory)
        _write_index(temporary, extents)
        (temporary / CONFIG_NAME).write_text(json.dumps(config_json, indent=2) + "\n", encoding="utf-8")
        for name, content in (files or {}).items():
            (temporary / name).write_bytes(content)
        temporary.chmod(0o755)
        _replace(directory, temporary)
    except OSError as error:
        raise CheckpointError(f"{directory}: cannot be written: {error.strerror or error}") from None
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)


def check_target(directory: Path, *, overwrite: bool) -> None:
    """Raise CheckpointError unless a checkpoint may be written at `directory`: absent, empty, or to be replaced."""
    above = next(p for p in (directory, *directory.parents) if p.exists())
    if above != directory:
        if not above.is_dir():
            raise CheckpointError(f"{directory}: cannot be written: {above} is a file")
        return
    if not directory.is_dir():
        raise CheckpointError(f"{directory}: is a file; a checkpoint is a directory")
    held = sorted(p.name for p in directory.iterdir())
    if held and not overwrite:
        raise CheckpointError(f"{directory}: is not empty; choose another directory or empty this one")
    foreign = [n for n in held if n not in _OWN_FILES and not n.endswith(".safetensors")]
    if foreign:
        raise CheckpointError(f"{directory}: holds {foreign[0]}, which is no part of a checkpoint; not overwritten")


def stored_form(spec: TensorSpec, values: torch.Tensor) -> Iterator[Named]:
    """`values` (fp32, of spec.value_shape) of one weight as they are stored: the weight, then its scales if any."""
    if spec.scale_name is None:
        yield spec.name, values.to(torch.float32 if spec.dtype == "F32" else torch.bfloat16)
        return
    encode = {"fp8": encode_fp8, "fp4": encode_fp4, "table": encode_rows}[spec.kind]
    codes, scale = encode(values)
    yield spec.name, codes
    yield spec.scale_name, scale.view(torch.float8_e8m0fnu)


def model_tensors(model: torch.nn.Module, config: ModelConfig) -> Iterator[Named]:
    """A model's parameters and Engram tables as stored tensors; weights that were loaded come out as they went in."""
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for spec in tensor_table(config).values():
        tensor = state[str(spec.target)].detach()
        if spec.kind == "table":
            yield spec.name, tensor.view(torch.float8_e8m0fnu) if spec.is_scale else tensor
        elif not spec.is_scale:
            tensor = tensor if spec.expert is None else tensor[spec.expert]
            yield from stored_form(spec, tensor.cpu().float())


def safetensors_bytes(tensors: Iterable[Named]) -> Iterator[bytes | memoryview]:
    """The pieces of a safetensors file that holds `tensors`: header, then data, wide elements first for alignment."""
    ordered = sorted(tensors, key=lambda t: -t[1].element_size())
    header: dict[str, Any] = {}
    at = 0
    for name, tensor in ordered:
        span = [at, at + tensor.nbytes]
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": span}
        at = span[1]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield struct.pack("<Q", len(text)) + text
    for _, tensor in ordered:
        yield tensor.contiguous().view(-1).view(torch.uint8).numpy().data


_OWN_FILES = (CONFIG_NAME, INDEX_NAME, TOKENIZER_NAME)


def _write_shards(directory: Path, tensors: Iterable[Named], shard_bytes: int) -> dict[str, Extent]:
    """Write numbered shards, then give them their names, which contain the count."""
    shards: list[list[Extent]] = []
    for number, shard in enumerate(_batches(tensors, shard_bytes)):
        path = directory / f"{number}.part"
        with path.open("wb") as file:
            file.writelines(safetensors_bytes(shard))
            file.flush()
            os.fsync(file.fileno())
        shards.append([Extent(n, _DTYPES[t.dtype], tuple(t.shape), path, 0, t.nbytes) for n, t in shard])
    found: dict[str, Extent] = {}
    for number, shard in enumerate(shards):
        path = directory / f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        (directory / f"{number}.part").rename(path)
        for e in shard:
            if e.name in found:
                raise CheckpointError(f"{e.name} was given twice")
            found[e.name] = Extent(e.name, e.dtype, e.shape, path, e.offset, e.nbytes)
    return found


def _batches(tensors: Iterable[Named], limit: int) -> Iterator[list[Named]]:
    batch: list[Named] = []
    size = 0
    for name, tensor in tensors:
        batch.append((name, tensor))
        size += tensor.nbytes
        if size >= limit:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _write_index(directory: Path, extents: Mapping[str, Extent]) -> None:
    index = {
        "metadata": {"total_size": sum(e.nbytes for e in extents.values())},
        "weight_map": {name: e.file.name for name, e in extents.items()},
    }
    (directory / INDEX_NAME).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")


def _replace(directory: Path, temporary: Path) -> None:
    """Give `temporary` the name `directory`; an old checkpoint is moved away first and put back if that fails."""
    if not directory.exists() or not any(directory.iterdir()):
        temporary.rename(directory)  # onto an empty directory is allowed
        return
    old = temporary.with_name(temporary.name + "-old")
    directory.rename(old)
    try:
        temporary.rename(directory)
    except OSError:
        old.rename(directory)
        raise
    shutil.rmtree(old, ignore_errors=True)
