"""Safe names, digests, and a folder that appears whole or not at all."""

from __future__ import annotations

import hashlib
import os
import shutil
import struct
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from .errors import BundleError

_CHUNK = 1 << 20
_BLOCK, _BLOCKS = 1 << 16, 64


def checked_path(root: Path, name: str) -> Path:
    """The file `name` of the folder `root`. Raises BundleError for a name that leaves the folder, links included."""
    pure = PurePosixPath(name)
    if pure.is_absolute() or ".." in pure.parts or "\\" in name or "\0" in name or str(pure) != name or name == ".":
        raise BundleError(f"{root}: file name {name!r} is not allowed; names are relative, inside the engine folder")
    path = root.joinpath(*pure.parts)
    try:
        found = path.resolve()
    except (OSError, RuntimeError):
        raise BundleError(f"{root}: {name} is a link that leads nowhere; copy the file") from None
    if not found.is_relative_to(root.resolve()):
        raise BundleError(f"{root}: {name} is a link to {found}, outside the engine folder; copy the file")
    return path


def sha256_file(path: Path) -> str:
    """Digest of a file's contents. Raises BundleError for a file that cannot be read."""
    digest = hashlib.sha256()
    for chunk in _chunks(path):
        digest.update(chunk)
    return digest.hexdigest()


def sha256_head(path: Path) -> str:
    """Digest of a safetensors file's header (names, dtypes, shapes, offsets), of the whole of any other file.

    Raises BundleError for a file that cannot be read.
    """
    if path.suffix != ".safetensors":
        return sha256_file(path)
    with _reading(path) as file:
        length = file.read(8)
        header = file.read(min(struct.unpack("<Q", length)[0], 100_000_000)) if len(length) == 8 else b""
    return hashlib.sha256(length + header).hexdigest()


def sha256_sample(path: Path) -> str:
    """Digest of 64 blocks of 64 KiB spread evenly over a file, the first and the last among them.

    A file of up to 4 MiB is covered whole; of a larger one, it tells weights apart without reading all of them.
    Raises BundleError for a file that cannot be read.
    """
    digest = hashlib.sha256()
    with _reading(path) as file:
        last = max(file.seek(0, os.SEEK_END) - _BLOCK, 0)
        for block in range(_BLOCKS):
            file.seek(last * block // (_BLOCKS - 1))
            digest.update(file.read(_BLOCK))
    return digest.hexdigest()


def _chunks(path: Path) -> Iterator[bytes]:
    with _reading(path) as file:
        while chunk := file.read(_CHUNK):
            yield chunk


@contextmanager
def _reading(path: Path) -> Iterator[BinaryIO]:
    try:
        with path.open("rb") as file:
            yield file
    except OSError as error:
        raise BundleError(f"{path}: cannot be read: {error.strerror or error}") from None


def write_synced(path: Path, data: str | bytes) -> None:
    """Write a new file and flush it to the disk; makes its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("xb") as file:
        file.write(data.encode() if isinstance(data, str) else data)
        file.flush()
        os.fsync(file.fileno())


def copy_synced(source: Path, path: Path) -> None:
    """Copy a file's contents and flush them to the disk; makes the folder.

    Raises BundleError for a source that cannot be read.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("xb") as file:
        for chunk in _chunks(source):
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def appearing(path: Path) -> Iterator[Path]:
    """A fresh folder beside `path` that takes its place when the block ends, and vanishes if the block raises.

    What stood at `path` stays until then, and is back in place if the exchange itself is interrupted.
    Raises BundleError if the disk refuses.
    """
    token = uuid.uuid4().hex[:8]
    fresh = path.parent / f".{path.name}.{token}.partial"
    old = path.parent / f".{path.name}.{token}.old"
    try:
        fresh.mkdir()
        yield fresh
        for folder in [fresh, *(p for p in fresh.rglob("*") if p.is_dir())]:
            _sync_folder(folder)
        try:
            if path.exists():
                path.rename(old)
            fresh.rename(path)
        except BaseException:
            if old.exists() and not path.exists():
                old.rename(path)
            raise
        _sync_folder(path.parent)
    except OSError as error:
        raise BundleError(f"{path}: cannot be written: {error.strerror or error}") from None
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
        if path.exists():
            shutil.rmtree(old, ignore_errors=True)


def _sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
