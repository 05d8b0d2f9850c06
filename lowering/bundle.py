"""The engine folder: written whole or not at all, and checked before anything in it is used.

    manifest.json                     what everything is (manifest.py)
    config.json, tokenizer.json, engram_token_map.safetensors
                                      the checkpoint's own, where it has them
    parts/NAME.json, parts/NAME.ir    what runs, and its text for reading
    passes/NN_NAME.ir, .diff          the graph after each pass, and what the pass changed
    weights/                          a whole checkpoint, if the engine carries its weights
    report.html                       the pass report, if there is one

Everything is JSON, text or safetensors: loading an engine executes nothing that it contains.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from precede.model.cache import CacheLayout, KVFormat, Store
from precede.model.config import ModelConfig
from precede.model.numerics import Numerics
from precede.model.shards import INDEX_NAME, find_tensors

from .errors import BundleError
from .files import appearing, checked_path, copy_synced, sha256_file, write_synced
from .manifest import (
    MANIFEST_NAME,
    CheckpointEntry,
    CheckpointFile,
    Decision,
    FileEntry,
    Manifest,
    ModelEntry,
    NumericsEntry,
    OptionsEntry,
    PartEntry,
    PassEntry,
    PassReport,
    Versions,
    WeightEntry,
    cache_entry,
    config_values,
    fingerprint,
    listed_files,
)
from .part import PartSpec
from .verify import Bundle, read_bundle

__all__ = ["Bundle", "EngineContents", "PartContents", "PassContents", "read_bundle", "write_bundle"]

CONFIG_NAME = "config.json"
WEIGHTS_FOLDER = "weights"
# Small files that an engine always carries itself, so that it can be read without its checkpoint.
CARRIED = (CONFIG_NAME, "tokenizer.json", "engram_token_map.safetensors")


@dataclass(frozen=True, kw_only=True)
class PartContents:
    """A part and its text for reading."""

    spec: PartSpec
    backend: str
    text: str | None = None


@dataclass(frozen=True, kw_only=True)
class PassContents:
    """What a pass did, the graph's text after it, and its diff."""

    report: PassReport
    ir: str
    diff: str


@dataclass(frozen=True, kw_only=True)
class EngineContents:
    """Everything that goes into an engine folder.

    options        the compile options as JSON values
    kv_format      the option that `layout` was made with
    checkpoint     the directory that holds the weights; or a function that writes a checkpoint (published layout, with
                   config.json) into the folder it is given, for weights that are only in memory
    digests        what `checkpoint_digests` said of the directory when its weights were read; None: not known
    copy_weights   carry the checkpoint's files inside the engine
    """

    target: str
    backend: str
    config: ModelConfig
    numerics: Numerics
    options: Mapping[str, Any]
    layout: CacheLayout
    kv_format: KVFormat
    store: Store
    parts: Sequence[PartContents]
    checkpoint: Path | Callable[[Path], None]
    digests: Sequence[CheckpointFile] | None = None
    copy_weights: bool = False
    passes: Sequence[PassContents] = ()
    decisions: Sequence[Decision] = ()
    report: str | None = field(default=None, repr=False)


def write_bundle(path: str | Path, contents: EngineContents) -> Manifest:
    """Write an engine folder at `path`, replacing an engine that is there; returns its manifest.

    Whatever goes wrong, `path` is afterwards either what it was or the complete new engine. Raises BundleError if the
    place cannot be written, holds anything but an engine, or holds files of the checkpoint, or if the checkpoint is
    not the one that was compiled.
    """
    path = Path(os.path.realpath(path))
    check_place(path)
    if isinstance(contents.checkpoint, Path):
        _check_config(contents.checkpoint, contents.config)
        _check_outside(path, contents.checkpoint, contents.copy_weights)
    with appearing(path) as folder:
        source = _write_weights(folder, contents)
        if contents.digests is not None:
            _check_digests(source, contents.digests)
        for name in CARRIED:
            if (source / name).is_file():
                copy_synced(source / name, folder / name)
        parts = [_write_part(folder, part) for part in contents.parts]
        passes = [_write_pass(folder, number, entry) for number, entry in enumerate(contents.passes)]
        if contents.report is not None:
            write_synced(folder / "report.html", contents.report)
        manifest = Manifest(
            versions=Versions(precede=version("precede"), torch=torch.__version__),
            target=contents.target,
            backend=contents.backend,
            numerics=NumericsEntry(**asdict(contents.numerics)),
            model=ModelEntry(
                config=config_values(contents.config), fingerprint=fingerprint(config_values(contents.config))
            ),
            options=OptionsEntry(values=dict(contents.options), fingerprint=fingerprint(dict(contents.options))),
            symbols=_symbols(contents.parts),
            parts=parts,
            weights=_weights(contents.parts),
            checkpoint=_checkpoint_entry(source, folder, path),
            cache=cache_entry(contents.layout, store=contents.store, kv_format=contents.kv_format),
            passes=passes,
            decisions=list(contents.decisions),
            files=[_file_entry(folder, file) for file in _files(folder)],
        )
        write_synced(folder / MANIFEST_NAME, manifest.to_json())
    return manifest


def checkpoint_digests(checkpoint: Path) -> list[CheckpointFile]:
    """Every file of a checkpoint directory that an engine refers to, as it is now.

    Raises CheckpointError or BundleError for files that cannot be read.
    """
    return [CheckpointFile.of(file) for file in _checkpoint_files(checkpoint)]


def check_place(path: Path) -> None:
    """Refuse a place where an engine may not appear: only nothing, an empty folder, or an engine may go.

    The engine may be of another schema version. Raises BundleError.
    """
    path, here = Path(os.path.realpath(path)), Path(os.path.realpath(os.curdir))
    if here.is_relative_to(path):
        raise BundleError(f"{path}: is the current directory or holds it; choose a folder of its own for the engine")
    if path.is_relative_to("/proc"):
        raise BundleError(f"{path}: is in /proc, which holds no files of anybody's; choose another place")
    if os.path.ismount(path):
        raise BundleError(f"{path}: is a mount point, which cannot be replaced; choose a folder inside it")
    if not path.parent.is_dir():
        raise BundleError(f"{path.parent}: no such directory; make it, or choose another place for the engine")
    if not path.exists():
        return
    advice = "choose another place, or remove it yourself"
    if not path.is_dir():
        raise BundleError(f"{path}: is a file; an engine is a folder: {advice}")
    if not (path / MANIFEST_NAME).is_file():
        if any(p.is_symlink() or not p.is_dir() for p in path.rglob("*")):
            raise BundleError(f"{path}: is not empty and holds no {MANIFEST_NAME}, so it is no engine: {advice}")
        return
    try:
        listed = listed_files((path / MANIFEST_NAME).read_bytes(), source=str(path / MANIFEST_NAME))
    except OSError as error:
        raise BundleError(f"{path / MANIFEST_NAME}: cannot be read: {error.strerror}") from None
    present = {p.relative_to(path).as_posix() for p in _files(path)}
    foreign = sorted(present - listed - {MANIFEST_NAME})
    if foreign:
        raise BundleError(f"{path}: holds {foreign[0]}, which is no file of the engine: {advice}")


def _check_config(checkpoint: Path, config: ModelConfig) -> None:
    if ModelConfig.from_file(checkpoint / CONFIG_NAME) != config:
        raise BundleError(
            f"{checkpoint / CONFIG_NAME}: differs from the config of the compiled model; compile from this checkpoint"
        )


def _check_outside(path: Path, checkpoint: Path, copy_weights: bool) -> None:
    """Refuse a checkpoint that would go with the engine that is replaced.

    Only an engine's own weights folder may be saved onto itself, because the copy takes its place.
    """
    if Path(os.path.realpath(checkpoint)).is_relative_to(path):
        if copy_weights:
            return
        raise BundleError(
            f"{path}: holds the checkpoint {checkpoint}, which would go with the old engine; save with copy_weights"
        )
    for file in _checkpoint_files(checkpoint):
        if Path(os.path.realpath(file)).is_relative_to(path):
            raise BundleError(
                f"{path}: holds {os.path.realpath(file)}, which {file} links to and which would go with the old "
                "engine; choose another place"
            )


def _check_digests(source: Path, compiled: Sequence[CheckpointFile]) -> None:
    found = {entry.name: entry for entry in checkpoint_digests(source)}
    known = {entry.name: entry for entry in compiled}
    for name in sorted(found.keys() | known.keys()):
        if found.get(name) != known.get(name):
            raise BundleError(f"{source / name}: has changed since the model was compiled; compile again")


def _write_weights(folder: Path, contents: EngineContents) -> Path:
    """The checkpoint that the engine will use, inside or outside."""
    target = folder / WEIGHTS_FOLDER
    if not isinstance(contents.checkpoint, Path):
        target.mkdir()
        contents.checkpoint(target)
        _check_config(target, contents.config)
        return target
    if not contents.copy_weights:
        return contents.checkpoint
    for file in _checkpoint_files(contents.checkpoint):
        copy_synced(file, target / file.name)
    return target


def _checkpoint_files(checkpoint: Path) -> list[Path]:
    shards = {extent.file for extent in find_tensors(checkpoint).values()}
    small = {checkpoint / name for name in (*CARRIED, INDEX_NAME)}
    return sorted(shards | {file for file in small if file.is_file()})


def _checkpoint_entry(source: Path, folder: Path, path: Path) -> CheckpointEntry:
    inside = source.is_relative_to(folder)
    files = checkpoint_digests(source)
    if inside:
        return CheckpointEntry(inside=True, path=WEIGHTS_FOLDER, relative=None, files=files)
    absolute = os.path.realpath(source)
    relative = os.path.relpath(absolute, path).replace(os.sep, "/")
    return CheckpointEntry(inside=False, path=absolute, relative=relative, files=files)


def _write_part(folder: Path, part: PartContents) -> PartEntry:
    spec = part.spec
    file, text = f"parts/{spec.name}.json", f"parts/{spec.name}.ir" if part.text is not None else None
    write_synced(folder / file, spec.to_json())
    if text is not None and part.text is not None:
        write_synced(folder / text, part.text)
    return PartEntry(
        name=spec.name,
        backend=part.backend,
        file=file,
        text=text,
        nodes=len(spec.nodes),
        inputs=spec.inputs,
        outputs=spec.outputs,
    )


def _write_pass(folder: Path, number: int, entry: PassContents) -> PassEntry:
    stem = f"passes/{number:02d}_{entry.report.name}"
    write_synced(folder / f"{stem}.ir", entry.ir)
    write_synced(folder / f"{stem}.diff", entry.diff)
    return PassEntry(
        report=entry.report,
        ir=f"{stem}.ir",
        diff=f"{stem}.diff",
        ir_sha256=sha256_file(folder / f"{stem}.ir"),
        diff_sha256=sha256_file(folder / f"{stem}.diff"),
    )


def _symbols(parts: Sequence[PartContents]) -> dict[str, tuple[int, int | None]]:
    found: dict[str, tuple[int, int | None]] = {}
    for part in parts:
        for name, bounds in part.spec.symbols.items():
            if found.setdefault(name, bounds) != bounds:
                raise BundleError(f"part {part.spec.name}: {name} has bounds {bounds}, elsewhere {found[name]}")
    return found


def _weights(parts: Sequence[PartContents]) -> list[WeightEntry]:
    found: dict[str, WeightEntry] = {}
    for part in parts:
        for spec in part.spec.inputs:
            if spec.role == "weight":
                shape = [int(d) for d in spec.shape]
                entry = WeightEntry(name=spec.source, dtype=spec.dtype, shape=shape, file=None, sha256=None)
                if found.setdefault(spec.source, entry) != entry:
                    raise BundleError(f"part {part.spec.name}: weight {spec.source} differs from another part's")
    return list(found.values())


def _file_entry(folder: Path, file: Path) -> FileEntry:
    name = file.relative_to(folder).as_posix()
    checked_path(folder, name)
    return FileEntry(path=name, size=file.stat().st_size, sha256=sha256_file(file))


def _files(folder: Path) -> Iterator[Path]:
    return (p for p in sorted(folder.rglob("*")) if not p.is_dir() or p.is_symlink())
