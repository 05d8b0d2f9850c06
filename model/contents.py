"""What is stored, against what the config asks for: names, dtypes and shapes, strictly."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from .errors import CheckpointError
from .shards import Extent
from .table import SKIPPED_PREFIXES, TensorSpec


def check_contents(table: Mapping[str, TensorSpec], extents: Mapping[str, Extent], where: Path) -> dict[str, Extent]:
    """The stored tensors that the model uses: all of `extents` but those under a skipped prefix.

    Raises CheckpointError for the first name, dtype or shape that differs from `table`, and says how many there are;
    `where` stands for the file of a tensor that is in none.
    """
    kept = {n: e for n, e in extents.items() if not n.startswith(SKIPPED_PREFIXES)}
    faults = [fault for n, e in kept.items() if (fault := _difference(table.get(n), e)) is not None]
    faults += [_missing(spec, kept, where) for name, spec in table.items() if name not in kept]
    if faults:
        more = f" (and {len(faults) - 1} more differences from the config)" if len(faults) > 1 else ""
        raise CheckpointError(faults[0] + more)
    return kept


def _difference(spec: TensorSpec | None, extent: Extent) -> str | None:
    if spec is None:
        return f"{extent.file}: {extent.name} is no tensor of this model"
    if extent.dtype != spec.dtype:
        multiplied_out = spec.scale_name is not None and extent.dtype == "BF16" and extent.shape == spec.value_shape
        hint = "; a multiplied-out checkpoint is opened with plain=True" if multiplied_out else ""
        return f"{extent.file}: {extent.name} is {extent.dtype}, expected {spec.dtype}{hint}"
    if extent.shape != spec.shape:
        return f"{extent.file}: {extent.name} has shape {list(extent.shape)}, expected {list(spec.shape)}"
    return None


def _missing(spec: TensorSpec, extents: Mapping[str, Extent], where: Path) -> str:
    weight = extents.get(spec.name.removesuffix("scale") + "weight") if spec.is_scale else None
    of = f", the block scales of {weight.name}," if weight else ""
    return f"{weight.file if weight else where}: {spec.name}{of} is missing, expected {spec.dtype} {list(spec.shape)}"
