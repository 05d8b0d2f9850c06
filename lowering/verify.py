"""Reading an engine folder: every check before the first use, in one order, each with expected and found.

1 the manifest, 2 files present, 3 their digests, 4 target, 5 torch, 6 backend, 7 parts and their operators, 8 config
and options, 9 cache layout and weights, 10 the checkpoint.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from precede.model.cache import CacheLayout
from precede.model.config import ModelConfig
from precede.model.errors import ConfigError, PrecedeError
from precede.model.numerics import Numerics

from .errors import BackendUnavailable, BundleError, EngineMismatch
from .files import checked_path, sha256_file, sha256_head
from .manifest import MANIFEST_NAME, CheckpointFile, FileEntry, Manifest, cache_entry, config_values, fingerprint
from .operators import resolve_operator
from .part import PartSpec
from .target import TARGETS

SUPPORTED_TORCH = ((2, 11), (2, 15))


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """A checked engine folder: everything needed to load it.

    checkpoint   the directory with the weights; its files are those that the engine was compiled from
    """

    path: Path
    manifest: Manifest
    config: ModelConfig
    numerics: Numerics
    layout: CacheLayout
    parts: Mapping[str, PartSpec]
    checkpoint: Path


def read_bundle(path: str | Path, *, checkpoint: str | Path | None = None, full: bool = False) -> Bundle:
    """Check the engine folder at `path` and its checkpoint.

    `checkpoint` says where the weights are now, if they have moved. `full` also reads the weights that the engine
    carries to compare their digests; otherwise sizes, headers and a sample of each file are compared.
    Raises BundleError for a folder that is damaged, EngineMismatch for one that does not fit this machine, torch or
    checkpoint, BackendUnavailable for one of a backend that this version cannot run.
    """
    path = Path(path)
    manifest = _read_manifest(path)
    _check_files(path, manifest, full)
    if manifest.target not in TARGETS:
        raise EngineMismatch(f"{path}: was built for target {manifest.target!r}, known are {', '.join(TARGETS)}")
    if TARGETS[manifest.target].device != "cpu":
        raise EngineMismatch(f"{path}: was built for target {manifest.target}, this version runs engines for cpu only")
    backends = {manifest.backend, *(p.backend for p in manifest.parts)}
    _check_torch(path, manifest.versions.torch, portable=backends == {"reference"})
    _check_backends(path, backends)
    parts = _read_parts(path, manifest)
    config = _check_model(path, manifest)
    numerics = Numerics(**manifest.numerics.model_dump())
    layout = _check_layout(path, manifest, config, numerics)
    _check_options(path, manifest, numerics)
    _check_weights(path, manifest, parts)
    found = _find_checkpoint(path, manifest, checkpoint)
    return Bundle(
        path=path, manifest=manifest, config=config, numerics=numerics, layout=layout, parts=parts, checkpoint=found
    )


def _read_manifest(path: Path) -> Manifest:
    if not path.is_dir():
        raise BundleError(f"{path}: no such folder; an engine is a folder made by compile and save")
    file = path / MANIFEST_NAME
    if not file.is_file():
        raise BundleError(f"{file}: no such file; {path} is no engine folder")
    try:
        return Manifest.parse(file.read_bytes(), source=str(file))
    except OSError as error:
        raise BundleError(f"{file}: cannot be read: {error.strerror}") from None


def _check_files(path: Path, manifest: Manifest, full: bool) -> None:
    listed: set[str] = set()
    for entry in manifest.files:
        if entry.path in listed:
            raise BundleError(f"{path / MANIFEST_NAME}: lists {entry.path} twice")
        listed.add(entry.path)
        file = checked_path(path, entry.path)
        if not file.is_file():
            raise BundleError(f"{file}: no such file, the manifest lists it; copy the whole engine folder")
        size = file.stat().st_size
        if size != entry.size:
            raise BundleError(f"{file}: {size} bytes, expected {entry.size}; copy the engine folder again")
    used = [p.file for p in manifest.parts] + [p.text for p in manifest.parts if p.text is not None]
    used += [name for p in manifest.passes for name in (p.ir, p.diff)] + ["config.json"]
    for name in used:
        if name not in listed:
            raise BundleError(f"{path / MANIFEST_NAME}: {name} is used, but is not in the list of files")
    heads = {f"weights/{f.name}": f for f in manifest.checkpoint.files} if manifest.checkpoint.inside else {}
    for entry in manifest.files:
        _check_digest(path / entry.path, entry, None if full else heads.get(entry.path))


def _check_digest(file: Path, entry: FileEntry, head: CheckpointFile | None) -> None:
    expected, found = (entry.sha256, sha256_file(file)) if head is None else (head.sha256, sha256_head(file))
    if found != expected:
        what = "contents" if head is None else "header"
        raise BundleError(
            f"{file}: {what} have SHA-256 {found[:16]}..., expected {expected[:16]}...; the file was changed or "
            "damaged, copy the engine folder again"
        )


def _check_torch(path: Path, built: str, *, portable: bool) -> None:
    """Operators saved by name run on any supported torch; compiled code on the version that compiled it."""
    low, high = SUPPORTED_TORCH
    running = _minor(torch.__version__)
    if not low <= running < high:
        raise EngineMismatch(
            f"{path}: torch {torch.__version__} is installed, engines run on {low[0]}.{low[1]} up to, but not "
            f"including, {high[0]}.{high[1]}; install one of them"
        )
    if not portable and _minor(built) != running:
        raise EngineMismatch(
            f"{path}: was compiled with torch {built}, installed is {torch.__version__}; install torch "
            f"{'.'.join(map(str, _minor(built)))}, or compile again"
        )


def _minor(version: str) -> tuple[int, int]:
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _check_backends(path: Path, backends: set[str]) -> None:
    for name in sorted(backends - {"reference"}):
        raise BackendUnavailable(
            f"{path}: was built by backend {name!r}, this version runs reference only; compile it again with "
            "backend reference"
        )


def _read_parts(path: Path, manifest: Manifest) -> dict[str, PartSpec]:
    parts: dict[str, PartSpec] = {}
    for entry in manifest.parts:
        file = path / entry.file
        part = PartSpec.parse(file.read_bytes(), source=str(file))
        if entry.name in parts:
            raise BundleError(f"{path / MANIFEST_NAME}: two parts are named {entry.name}")
        for what, found, expected in (
            ("name", part.name, entry.name),
            ("node count", len(part.nodes), entry.nodes),
            ("inputs", part.inputs, entry.inputs),
            ("outputs", part.outputs, entry.outputs),
            ("symbols", part.symbols, {s: manifest.symbols.get(s) for s in part.symbols}),
        ):
            if found != expected:
                raise BundleError(f"{file}: {what} differ from the manifest's entry for part {entry.name}; save again")
        for target in part.targets():
            resolve_operator(target, f"{file}")
        parts[entry.name] = part
    return parts


def _check_model(path: Path, manifest: Manifest) -> ModelConfig:
    for what, values, recorded in (
        ("model config", manifest.model.config, manifest.model.fingerprint),
        ("options", dict(manifest.options.values), manifest.options.fingerprint),
    ):
        found = fingerprint(values)
        if found != recorded:
            raise BundleError(
                f"{path / MANIFEST_NAME}: the {what} have fingerprint {found[:16]}..., recorded is {recorded[:16]}...; "
                "the manifest was edited, compile the engine again"
            )
    config = ModelConfig.from_file(path / "config.json")
    _compare_config(path / "config.json", config, manifest)
    return config


def _compare_config(file: Path, config: ModelConfig, manifest: Manifest) -> None:
    found = config_values(config)
    for key in sorted(found.keys() | manifest.model.config.keys()):
        ours, theirs = found.get(key), manifest.model.config.get(key)
        if ours != theirs:
            raise EngineMismatch(f"{file}: {key} is {ours!r}, the engine was compiled for {theirs!r}")


def _check_layout(path: Path, manifest: Manifest, config: ModelConfig, numerics: Numerics) -> CacheLayout:
    cache = manifest.cache
    layout = CacheLayout.of(
        config,
        numerics,
        page_size=cache.page_size,
        store=cache.store,
        kv_format=cache.kv_format,
        lookahead=cache.lookahead,
    )
    found = cache_entry(layout, store=cache.store, kv_format=cache.kv_format).model_dump()
    for name, expected in cache.model_dump().items():
        if found[name] != expected:
            raise EngineMismatch(
                f"{path}: cache {name} is {expected} in the engine, {found[name]} by this version and the engine's "
                "config and numerics; compile the engine again"
            )
    return layout


def _check_options(path: Path, manifest: Manifest, numerics: Numerics) -> None:
    """The manifest's own entries must be what its options ask for."""
    entries: dict[str, Any] = {
        "target": manifest.target,
        "backend": manifest.backend,
        "page_size": manifest.cache.page_size,
        "kv_format": manifest.cache.kv_format,
        "lookahead": manifest.cache.lookahead,
    }
    where = path / MANIFEST_NAME
    options = manifest.options.values
    for name, found in entries.items():
        asked = options.get(name, found)
        chosen = (name, asked) in (("target", "host"), ("backend", "auto"))
        if asked != found and not chosen:
            raise BundleError(f"{where}: {name} is {found!r}, its options say {asked!r}; compile the engine again")
    if "numerics" in options:
        try:
            asked = Numerics.of(options["numerics"])
        except ConfigError as error:
            raise BundleError(f"{where}: its options: {error}") from None
        if asked != numerics:
            raise BundleError(
                f"{where}: numerics are {numerics.describe()}, its options say {asked.describe()}; compile the engine "
                "again"
            )


def _check_weights(path: Path, manifest: Manifest, parts: Mapping[str, PartSpec]) -> None:
    listed = {w.name: (w.dtype, list(w.shape)) for w in manifest.weights}
    for name, part in parts.items():
        for spec in part.inputs:
            if spec.role == "weight" and listed.get(spec.source) != (spec.dtype, list(spec.shape)):
                raise BundleError(
                    f"{path / MANIFEST_NAME}: part {name} takes weight {spec.source}: {spec.dtype}{list(spec.shape)}, "
                    f"the list of weights has {listed.get(spec.source, 'nothing')}"
                )


def _find_checkpoint(path: Path, manifest: Manifest, given: str | Path | None) -> Path:
    """The first place that holds exactly the engine's checkpoint."""
    entry = manifest.checkpoint
    if given is not None:
        places = [Path(given)]
    elif entry.inside:
        places = [checked_path(path, entry.path)]
    else:
        places = [path.resolve() / entry.relative] if entry.relative is not None else []
        places.append(Path(entry.path))
    places = list(dict.fromkeys(Path(os.path.realpath(place)) for place in places))
    present = [place for place in places if place.is_dir()]
    if not present:
        raise EngineMismatch(
            f"{path}: its checkpoint is not at {' or '.join(map(str, places))}; say where it is now with "
            "checkpoint=DIRECTORY, or save engines with copy_weights"
        )
    faults: list[PrecedeError] = []
    for place in present:
        try:
            _check_checkpoint(place, manifest)
        except PrecedeError as error:
            faults.append(error)
        else:
            return place
    raise EngineMismatch("; ".join(map(str, faults)) + "; use the checkpoint that was compiled, or compile again")


def _check_checkpoint(directory: Path, manifest: Manifest) -> None:
    config = ModelConfig.from_file(directory / "config.json")
    _compare_config(directory / "config.json", config, manifest)
    for entry in manifest.checkpoint.files:
        difference = entry.difference(directory / entry.name)
        if difference is not None:
            raise EngineMismatch(f"{directory / entry.name}: {difference}")
