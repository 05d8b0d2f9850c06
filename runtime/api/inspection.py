"""A saved engine, to be read rather than run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from precede.lowering.bundle import Bundle, read_bundle
from precede.model.errors import PrecedeError
from precede.report import Report, part_row


class InspectionError(PrecedeError):
    """A question about an engine that it has no answer to."""


@dataclass(frozen=True)
class SavedEngine:
    """The report and the diffs that a compilation left in its engine folder."""

    bundle: Bundle

    @classmethod
    def open(cls, path: str | Path, *, checkpoint: str | Path | None = None) -> SavedEngine:
        """Check the folder as for loading, without loading weights. Raises what `load_engine` raises."""
        return cls(read_bundle(path, checkpoint=checkpoint))

    def report(self) -> Report:
        """The same report that the CompiledModel gave."""
        manifest = self.bundle.manifest
        return Report(
            passes=tuple(entry.report.model_dump() for entry in manifest.passes),
            parts=tuple(part_row(self.bundle.parts[entry.name], entry.backend) for entry in manifest.parts),
            decisions=tuple(decision.model_dump() for decision in manifest.decisions),
        )

    def diff(self, name: str) -> str:
        """The diff of one pass. Raises InspectionError for a pass that did not run."""
        for entry in self.bundle.manifest.passes:
            if entry.report.name == name:
                return (self.bundle.path / entry.diff).read_text(encoding="utf-8")
        known = ", ".join(entry.report.name for entry in self.bundle.manifest.passes)
        raise InspectionError(f"{self.bundle.path}: no pass {name!r} ran; there are {known}")
