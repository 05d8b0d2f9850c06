"""What a compilation did, as plain data and as tables for a terminal.

The data is the JSON of `--json`: `{"passes": [...], "parts": [...], "decisions": [...]}`. A CompiledModel and a saved
engine give the same, so both print through the same functions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from precede.terminal import printable

if TYPE_CHECKING:
    from precede.lowering.part import PartSpec
    from precede.model.table import TableRow
    from precede.runtime.request import RequestOutput


@dataclass(frozen=True)
class Report:
    """Passes, parts and decisions. `json()` is the data; printing it with rich (or `str`) shows the tables."""

    passes: tuple[Mapping[str, Any], ...]
    parts: tuple[Mapping[str, Any], ...]
    decisions: tuple[Mapping[str, Any], ...]

    def json(self) -> dict[str, Any]:
        """The object that `--json` writes."""
        return {"passes": list(self.passes), "parts": list(self.parts), "decisions": list(self.decisions)}

    def __rich__(self) -> RenderableType:
        return Group(pass_table(self.passes), part_table(self.parts), decision_table(self.decisions))

    def __str__(self) -> str:
        return plain(self)


def part_row(part: PartSpec, backend: str) -> dict[str, Any]:
    """A part as one entry of the report; no input is trimmed while a step runs all of its rows."""
    return {
        "name": part.name,
        "backend": backend,
        "nodes": len(part.nodes),
        "inputs": [{"name": i.name, "dtype": i.dtype, "shape": i.shape, "trimmed": False} for i in part.inputs],
        "outputs": [{"name": o.name, "dtype": o.dtype, "shape": o.shape} for o in part.outputs],
    }


def plain(renderable: RenderableType, width: int = 120) -> str:
    """What rich would print, as text without colour."""
    import io

    from rich.console import Console

    out = io.StringIO()
    Console(file=out, width=width, color_system=None, markup=False, emoji=False).print(renderable)
    return out.getvalue().rstrip("\n")


def pass_table(passes: Iterable[Mapping[str, Any]]) -> RenderableType:
    """One line a pass, then one line a miss with its reason."""
    table = _table("passes", "pass", ">matches", ">expected", ">misses", ">nodes before", ">nodes after", ">seconds")
    misses: list[Text] = []
    for row in passes:
        expected = "any" if row["expected"] is None else str(row["expected"])
        short = row["expected"] is not None and row["matches"] != row["expected"]
        _row(
            table,
            row["name"],
            str(row["matches"]),
            expected,
            str(len(row["misses"])),
            str(row["nodes_before"]),
            str(row["nodes_after"]),
            f"{row['seconds']:.2f}",
            style="yellow" if short else None,
        )
        misses += [Text(printable(f"  {row['name']} missed {m['node']}: {m['reason']}")) for m in row["misses"]]
    return Group(table, *misses)


def part_table(parts: Iterable[Mapping[str, Any]]) -> RenderableType:
    """One line a part: backend, size, what goes in and out."""
    table = _table("parts", "part", "backend", ">nodes", ">inputs", "outputs")
    for part in parts:
        outputs = ", ".join(f"{o['name']} {o['dtype']}[{', '.join(map(str, o['shape']))}]" for o in part["outputs"])
        _row(table, part["name"], part["backend"], str(part["nodes"]), str(len(part["inputs"])), outputs)
    return table


def decision_table(decisions: Iterable[Mapping[str, Any]]) -> RenderableType:
    """Who serves what and why, equal choices in one line, with everything that was refused."""
    folded: dict[tuple[str, str, str], tuple[list[str], list[Mapping[str, Any]]]] = {}
    for d in decisions:
        ops, refused = folded.setdefault((d["part"], d["implementation"], d["reason"]), ([], []))
        ops.append(d["op"])
        refused += [r for r in d["refused"] if r not in refused]
    table = _table("decisions", "op", "part", "implementation", "reason")
    for (part, implementation, reason), (ops, refused) in folded.items():
        _row(table, ops[0] if len(ops) == 1 else f"{len(ops)} operators", part, implementation, reason)
        for other in refused:
            _row(table, "", "", f"not {other['implementation']}", other["reason"])
    return table


def checkpoint_table(rows: Sequence[TableRow], sections: Mapping[str, tuple[int, int, int]]) -> RenderableType:
    """A checkpoint's tensors, equal layers in one line, with totals a section and in all."""
    table = _table("tensors", "name", "shape", "dtype", "layers", ">tensors", ">bytes")
    for row in rows:
        shape = " x ".join(map(str, row.shape))
        _row(table, row.name, shape, row.dtype, row.layers_text, f"{row.count:,}", f"{row.total_bytes:,}")
    sums = _table("totals", "section", ">tensors", ">bytes", ">parameters")
    for name, (count, size, parameters) in sections.items():
        _row(sums, name, f"{count:,}", f"{size:,}", f"{parameters:,}")
    return Group(table, sums)


def generation_table(outputs: Sequence[RequestOutput]) -> RenderableType:
    """Lengths and times of each output."""
    columns = (">prompt", ">tokens", "finished", ">prefill", ">per token", ">tokens/s")
    table = _table("generation", ">request", *columns)
    for number, output in enumerate(outputs):
        t = output.timings
        _row(
            table,
            str(number),
            str(len(output.prompt_token_ids)),
            str(len(output.token_ids)),
            output.finish_reason,
            f"{t.prefill_seconds * 1e3:.1f} ms",
            "-" if t.seconds_per_token is None else f"{t.seconds_per_token * 1e3:.1f} ms",
            "-" if t.tokens_per_second is None else f"{t.tokens_per_second:.1f}",
        )
    return table


def _row(table: Table, *cells: str, style: str | None = None) -> None:
    """A row of plain texts: what files and users wrote is neither markup nor a way to steer the terminal."""
    table.add_row(*(Text(printable(cell)) for cell in cells), style=style)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", header_style="bold")
    for column in columns:
        right = column.startswith(">")
        table.add_column(column.lstrip(">"), justify="right" if right else "left", overflow="fold")
    return table
