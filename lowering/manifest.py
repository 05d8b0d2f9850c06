"""`manifest.json`: what an engine folder is, for what it was built, and every file in it.

The classes are the schema; `manifest.schema.json` beside this file is their JSON Schema. Paths are relative to the
engine folder, with forward slashes.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from precede.model.cache import CacheLayout, KVFormat, RecordFormat, Store
from precede.model.config import ModelConfig

from .errors import BundleError, EngineMismatch
from .files import sha256_head, sha256_sample
from .part import Dtype, InputSpec, Name, OutputSpec, Record, describe, parse_json

SCHEMA = "precede.engine/1"
MANIFEST_NAME = "manifest.json"

Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Size = Annotated[int, Field(ge=0)]
Path_ = Annotated[str, Field(min_length=1, max_length=1024)]


class FileEntry(Record):
    """A file of the engine folder, the manifest itself excepted."""

    path: Path_
    size: Size
    sha256: Sha256


class Versions(Record):
    """What the engine was built with."""

    precede: str
    torch: str


class ModelEntry(Record):
    """The model's config by ModelConfig's field names, and the fingerprint of exactly these values."""

    config: dict[str, Any]
    fingerprint: Sha256


class OptionsEntry(Record):
    """The compile options and the fingerprint of exactly these values."""

    values: dict[str, Any]
    fingerprint: Sha256


class NumericsEntry(Record):
    """The numerics switches, resolved."""

    compute: Literal["float32", "bfloat16"]
    kv_quant: bool
    act_quant: bool
    gemm_accumulate: Literal["float32", "float64"]


class PartEntry(Record):
    """One part: the file that runs, the text to read, and the part's interface."""

    name: Name
    backend: str
    file: Path_
    text: Path_ | None
    nodes: Size
    inputs: list[InputSpec]
    outputs: list[OutputSpec]


class WeightEntry(Record):
    """A weight that parts ask for.

    `file` and `sha256` are set for a tensor stored in the engine folder in the form that the program takes; null for
    one that the loader makes from the checkpoint, whose files are listed in `checkpoint`.
    """

    name: str
    dtype: Dtype
    shape: list[int]
    file: Path_ | None
    sha256: Sha256 | None


class CheckpointFile(Record):
    """A file of the checkpoint: digests that tell it from another one without reading all of it.

    `sha256` covers the header of a safetensors file, the whole of any other; `sample` 64 blocks of 64 KiB spread
    evenly over the file, which is all of a file of up to 4 MiB.
    """

    name: Annotated[str, Field(pattern=r"^[^/\\]+$")]
    size: Size
    sha256: Sha256
    sample: Sha256

    @classmethod
    def of(cls, file: Path) -> CheckpointFile:
        """The entry of a file as it is now. Raises BundleError if it cannot be read."""
        try:
            size = file.stat().st_size
        except OSError as error:
            raise BundleError(f"{file}: cannot be read: {error.strerror}") from None
        return cls(name=file.name, size=size, sha256=sha256_head(file), sample=sha256_sample(file))

    def difference(self, file: Path) -> str | None:
        """How `file` differs from this entry, as the rest of a sentence; None if it does not."""
        if not file.is_file():
            return "no such file, the engine's checkpoint has it"
        found = CheckpointFile.of(file)
        if found.size != self.size:
            return f"{found.size} bytes, the engine's checkpoint has {self.size}"
        head = "header" if file.suffix == ".safetensors" else "contents"
        for what, ours, theirs in ((head, found.sha256, self.sha256), ("contents", found.sample, self.sample)):
            if ours != theirs:
                return f"{what} have SHA-256 {ours[:16]}..., the engine's checkpoint {theirs[:16]}..."
        return None


class CheckpointEntry(Record):
    """Where the weights come from: the engine's own `weights/` (inside), or a directory elsewhere.

    A directory elsewhere is looked for at `relative`, from the engine folder, then at `path`; the first one whose
    files are those listed is taken.
    """

    inside: bool
    path: Path_
    relative: Path_ | None
    files: list[CheckpointFile]


class StoreEntry(Record):
    """How one kind of cache record is stored; `width` in elements of `dtype`."""

    quantiser: Literal["none", "fp8", "nvfp4", "mxfp4"]
    packed: bool
    dtype: Dtype
    width: Size


class CacheEntry(Record):
    """The cache layout that the parts read and write; serving with another one is refused."""

    page_size: Annotated[int, Field(ge=1)]
    lookahead: Size
    store: Literal["values", "packed"]
    kv_format: Literal["auto", "nvfp4", "fp8", "bf16"]
    latent: StoreEntry
    window: StoreEntry
    index_key: StoreEntry
    page_bytes: Size
    bytes_per_token: float
    ring_bytes: Size


class PassMiss(Record):
    """A place that a pass looked at and left alone."""

    node: str
    reason: str


class PassReport(Record):
    """What a pass did; `expected` is null where any number of matches is fine."""

    name: str
    numerics: Literal["exact", "tolerance"]
    matches: Size
    expected: Size | None
    misses: list[PassMiss]
    nodes_before: Size
    nodes_after: Size
    seconds: Annotated[float, Field(ge=0)]


class PassEntry(Record):
    """A pass that made the parts, with digests of the graph after it and of its diff."""

    report: PassReport
    ir: Path_
    diff: Path_
    ir_sha256: Sha256
    diff_sha256: Sha256


class Refusal(Record):
    """An implementation that was not chosen, and why."""

    implementation: str
    reason: str


class Decision(Record):
    """What runs an operator of a part ("*": all of them), and why."""

    op: str
    part: str
    implementation: str
    reason: str
    refused: list[Refusal]


class Manifest(Record):
    """The whole file."""

    schema_: Annotated[Literal["precede.engine/1"], Field(alias="schema")] = SCHEMA
    versions: Versions
    target: str
    backend: str
    numerics: NumericsEntry
    model: ModelEntry
    options: OptionsEntry
    symbols: dict[str, tuple[int, int | None]]
    parts: Annotated[list[PartEntry], Field(min_length=1)]
    weights: list[WeightEntry]
    checkpoint: CheckpointEntry
    cache: CacheEntry
    passes: list[PassEntry]
    decisions: list[Decision]
    files: list[FileEntry]

    @classmethod
    def parse(cls, data: str | bytes, *, source: str = MANIFEST_NAME) -> Manifest:
        """Read the file's text. Raises EngineMismatch for another schema version, BundleError for a malformed file."""
        parsed = parse_json(data, source)
        found = parsed.get("schema") if isinstance(parsed, dict) else None
        if not isinstance(found, str) or not found.startswith("precede.engine/"):
            raise BundleError(f"{source}: schema is {found!r}, expected {SCHEMA!r}; this is no engine of precede")
        if found != SCHEMA:
            raise EngineMismatch(
                f"{source}: schema is {found!r}, this version reads {SCHEMA!r}; compile the engine again, or use the "
                "version of precede that wrote it"
            )
        try:
            return cls.model_validate_json(data)
        except ValidationError as error:
            raise BundleError(f"{source}: {describe(error, parsed)}") from None

    def to_json(self) -> str:
        """The file's text."""
        return json.dumps(self.model_dump(by_alias=True), indent=1, allow_nan=False) + "\n"


def fingerprint(value: Any) -> str:
    """SHA-256 of a JSON value in canonical form: sorted keys, no spaces."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def listed_files(data: bytes, *, source: str) -> set[str]:
    """The files that a manifest of any schema version lists. Raises BundleError for a file that is no manifest."""
    parsed = parse_json(data, source)
    schema, files = (parsed.get(key) if isinstance(parsed, dict) else None for key in ("schema", "files"))
    if isinstance(schema, str) and schema.startswith("precede.engine/") and isinstance(files, list):
        paths = [entry.get("path") if isinstance(entry, dict) else None for entry in files]
        return {path for path in paths if isinstance(path, str)}
    raise BundleError(f"{source}: is no manifest of an engine; choose another place, or remove it yourself")


def cache_entry(layout: CacheLayout, *, store: Store, kv_format: KVFormat) -> CacheEntry:
    """What a manifest says of `layout`, which was made with `store` and `kv_format`."""
    c = layout.config

    def entry(form: RecordFormat, dim: int) -> StoreEntry:
        dtype = str(form.stored_dtype).removeprefix("torch.")
        return StoreEntry(quantiser=form.quantiser, packed=form.packed, dtype=dtype, width=form.width(dim))

    return CacheEntry(
        page_size=layout.page_size,
        lookahead=layout.lookahead,
        store=store,
        kv_format=kv_format,
        latent=entry(layout.latent, c.head_dim),
        window=entry(layout.window, c.head_dim),
        index_key=entry(layout.index_key, c.index_head_dim),
        page_bytes=layout.page_bytes(),
        bytes_per_token=layout.bytes_per_token(),
        ring_bytes=layout.ring_bytes(),
    )


def config_values(config: ModelConfig) -> dict[str, Any]:
    """A config's fields as JSON values."""
    return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(config).items()}


def json_schema() -> str:
    """The JSON Schema of the manifest, as kept in `manifest.schema.json`."""
    return json.dumps(Manifest.model_json_schema(by_alias=True), indent=1, sort_keys=True) + "\n"
