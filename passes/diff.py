"""What a pass changed, folded: equal edits of many layers are one hunk with a layer range.

Names are unique, so a line that stands on both sides is the same value and lines pair up in linear time; what is out of
order or on one side only is a change. Each hunk is rewritten with its own layer as `i`, the neighbours as `i-1`, `i+1`.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .text import Line

_OWN_LAYER = re.compile(r"(?<![A-Za-z0-9])L(\d+)|layers\.(\d+)")


@dataclass(frozen=True)
class Hunk:
    """One edit and the layers in which it occurs; lines start with ' ', '-' or '+'. `None` stands for no layer."""

    layers: tuple[int | None, ...]
    lines: tuple[str, ...]

    def title(self) -> str:
        """`layers 0-39 (40x)`, or `model`."""
        numbers = [n for n in self.layers if n is not None]
        where = f"layers {ranges(numbers)}" if numbers else "model"
        return f"{where} ({len(self.layers)}x)"


@dataclass(frozen=True)
class Diff:
    """Folded hunks between two texts; `str()` prints them, `json()` gives plain data."""

    hunks: tuple[Hunk, ...]
    removed: int
    added: int

    def __str__(self) -> str:
        out: list[str] = []
        for hunk in self.hunks:
            out += [f"@@ {hunk.title()} @@", *hunk.lines]
        return "\n".join(out)

    def json(self) -> dict[str, Any]:
        """Removed and added line counts, and the hunks with their layers."""
        hunks = [{"layers": list(h.layers), "title": h.title(), "lines": list(h.lines)} for h in self.hunks]
        return {"removed": self.removed, "added": self.added, "hunks": hunks}


def diff(before: Sequence[Line], after: Sequence[Line], *, context: int = 1) -> Diff:
    """Compare two printed graphs; `context` unchanged lines are kept around each edit."""
    edits, removed, added = _edits(before, after)
    folded: dict[tuple[str, ...], list[int | None]] = {}
    for group in _groups(edits, context):
        layer = next((line.layer for sign, line in group if sign != " " and line.layer is not None), None)
        body = tuple(f"{sign} {_relative(line.text, layer)}" for sign, line in group)
        folded.setdefault(body, []).append(layer)
    return Diff(tuple(Hunk(tuple(layers), body) for body, layers in folded.items()), removed, added)


def ranges(numbers: Sequence[int]) -> str:
    """`0-3, 5` for 0, 1, 2, 3, 5."""
    spans: list[list[int]] = []
    for n in sorted(set(numbers)):
        if spans and n == spans[-1][1] + 1:
            spans[-1][1] = n
        else:
            spans.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)


def _edits(before: Sequence[Line], after: Sequence[Line]) -> tuple[list[tuple[str, Line]], int, int]:
    """All lines of both sides in one sequence, each marked ' ', '-' or '+'."""
    kept_before, kept_after = _common([line.text for line in before], [line.text for line in after])
    edits: list[tuple[str, Line]] = []
    i = j = 0
    for ki, kj in [*zip(kept_before, kept_after, strict=True), (len(before), len(after))]:
        gap = [("-", line) for line in before[i:ki]] + [("+", line) for line in after[j:kj]]
        for layer in dict.fromkeys(line.layer for _, line in gap):
            edits += [e for e in gap if e[1].layer == layer]
        if ki < len(before):
            edits.append((" ", before[ki]))
        i, j = ki + 1, kj + 1
    return edits, len(before) - len(kept_before), len(after) - len(kept_after)


def _common(a: Sequence[str], b: Sequence[str]) -> tuple[list[int], list[int]]:
    """Indices of a longest sequence of lines that stand in both, in the same order."""
    where = {key: j for j, key in enumerate(_numbered(b))}
    pairs = [(i, where[key]) for i, key in enumerate(_numbered(a)) if key in where]
    tails: list[int] = []
    ends: list[int] = []
    previous = [-1] * len(pairs)
    for p, (_, j) in enumerate(pairs):
        at = bisect_left(tails, j)
        if at == len(tails):
            tails.append(j)
            ends.append(p)
        else:
            tails[at], ends[at] = j, p
        previous[p] = ends[at - 1] if at else -1
    chain: list[int] = []
    p = ends[-1] if ends else -1
    while p >= 0:
        chain.append(p)
        p = previous[p]
    return [pairs[p][0] for p in reversed(chain)], [pairs[p][1] for p in reversed(chain)]


def _numbered(lines: Sequence[str]) -> list[tuple[str, int]]:
    seen: Counter[str] = Counter()
    keys: list[tuple[str, int]] = []
    for line in lines:
        keys.append((line, seen[line]))
        seen[line] += 1
    return keys


def _groups(edits: Sequence[tuple[str, Line]], context: int) -> list[list[tuple[str, Line]]]:
    """Runs of changes with their context; unchanged lines beyond it, or another layer, end a run."""
    changed = [i for i, (sign, _) in enumerate(edits) if sign != " "]
    spans: list[list[int]] = []
    for i in changed:
        near = bool(spans) and i - spans[-1][1] <= 2 * context + 1
        same = near and edits[i][1].layer == edits[spans[-1][1]][1].layer
        if same:
            spans[-1][1] = i
        else:
            spans.append([i, i])
    groups: list[list[tuple[str, Line]]] = []
    for first, last in spans:
        lead = [e for e in edits[max(0, first - context) : first] if e[0] == " "]
        tail = [e for e in edits[last + 1 : last + 1 + context] if e[0] == " "]
        groups.append([*lead, *edits[first : last + 1], *tail])
    return groups


def _relative(text: str, layer: int | None) -> str:
    if layer is None:
        return text

    def rewrite(m: re.Match[str]) -> str:
        distance = int(m[1] or m[2]) - layer
        return ("L" if m[1] else "layers.") + ("i" if distance == 0 else f"i{distance:+d}")

    return _OWN_LAYER.sub(rewrite, text)
