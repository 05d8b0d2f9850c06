"""Decisions as text: which backend or kernel serves which operator, and why."""

from __future__ import annotations

from collections.abc import Iterable

from .manifest import Decision


def explain(decisions: Iterable[Decision]) -> str:
    """One line for each choice, equal ones folded to a list of operators, each followed by what was refused."""
    groups: dict[tuple[str, str, str, tuple[tuple[str, str], ...]], list[str]] = {}
    for decision in decisions:
        refused = tuple((r.implementation, r.reason) for r in decision.refused)
        key = (decision.part, decision.implementation, decision.reason, refused)
        groups.setdefault(key, []).append(decision.op)
    lines = []
    for (part, implementation, reason, refused), ops in groups.items():
        if ops == ["*"]:
            what = "everything" if part == "*" else f"part {part}"
        else:
            what = f"part {part}, {len(ops)} operators ({', '.join(ops)})" if len(ops) > 1 else f"part {part}, {ops[0]}"
        lines.append(f"{what}: {implementation}, {reason}")
        lines += [f"  not {name}: {why}" for name, why in refused]
    return "\n".join(lines)
