"""What every graph must satisfy between two passes, and what no pass may change.

FX's own lint knows argument order and nothing else: a cache write moved behind the read that needs it passes. Here the
accesses to each mutated input are compared with those before the pass: the same alternation of reads and writes, and
each surviving access between the same writes, each new one in place of one that was between them.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from torch import fx

from . import _torch
from .errors import VerifyError
from .graph import Access, Graph, is_pure

NAMESPACES = ("aten", "prims", "precede")


@dataclass(frozen=True, kw_only=True)
class State:
    """What is compared across a pass: types by name, and the order of effects."""

    types: Mapping[str, str]
    alternation: Mapping[str, str]
    epochs: Mapping[tuple[str, str], int]
    output: str

    @classmethod
    def of(cls, graph: Graph) -> State:
        """Remember a graph's present state."""
        effects = graph.effects()
        types = {
            n.meta["ssa"]: graph.describe(n.meta["val"]) for n in graph.fx.nodes if {"ssa", "val"} <= n.meta.keys()
        }
        return cls(
            types=types,
            alternation={source: alternation(accesses) for source, accesses in effects.items()},
            epochs={
                (source, access.node.meta["ssa"]): epoch
                for source, accesses in effects.items()
                for epoch, access in _epochs(accesses)
                if "ssa" in access.node.meta
            },
            output=graph.describe(graph.output().meta["val"]),
        )


def alternation(accesses: Sequence[Access]) -> str:
    """Reads and writes in order, runs of reads as one: `rwrwr`."""
    kinds = ["w" if a.writes else "r" for a in accesses]
    return "".join("r" if kind == "r" else "w" * len(list(run)) for kind, run in groupby(kinds))


def effects_kept(before: State, after: State) -> bool:
    """Whether the order of effects is the same."""
    return not _moved(before, after)


def verify(graph: Graph, after: str, before: State | None = None) -> State:
    """Check a graph that the pass `after` left. Returns its state; raises VerifyError naming the pass and the node."""

    def fail(node: fx.Node | None, what: str) -> VerifyError:
        name = "" if node is None else f"%{node.meta.get('ssa', node.name)}: "
        return VerifyError(f"{after} left an illegal graph: {name}{what}")

    try:
        graph.fx.lint()
    except RuntimeError as error:
        raise fail(None, str(error).partition("\n")[0]) from error
    for node in graph.fx.nodes:
        if node.op == "output":
            continue
        if node.op not in ("placeholder", "call_function"):
            raise fail(node, f"a node of kind {node.op}; a graph holds inputs and calls only")
        if "val" not in node.meta:
            raise fail(node, "no type (meta val); set it where the node is made")
        if "ssa" not in node.meta:
            raise fail(node, "no name (meta ssa); name_values gives names to new values")
        if node.op == "call_function" and not known_target(node):
            raise fail(node, f"unknown op {node.target}; only {', '.join(NAMESPACES)}, getitem and sizes may occur")
        if not node.users and is_pure(node):
            raise fail(node, "unused and without effect; erase it")
    double = [name for name, count in Counter(n.meta.get("ssa") for n in graph.fx.nodes).items() if count > 1]
    if double:
        raise fail(None, f"two values are named %{double[0]}")
    state = State.of(graph)
    if before is not None:
        if state.output != before.output:
            raise fail(graph.output(), f"the result is {state.output}, it was {before.output}")
        for name, kind in state.types.items():
            if before.types.get(name, kind) != kind:
                raise fail(graph.node(name), f"is {kind}, it was {before.types[name]}")
        moved = _moved(before, state)
        if moved:
            raise fail(None, moved)
    return state


def known_target(node: fx.Node) -> bool:
    """Whether a call is one that lowering can meet."""
    target: Any = node.target
    if isinstance(target, _torch.OpOverload):
        return target.namespace in NAMESPACES
    return target is operator.getitem or _torch.is_symbolic(node.meta.get("val"))


def _moved(before: State, after: State) -> str:
    for source, order in before.alternation.items():
        now = after.alternation.get(source, "")
        if now != order:
            return f"accesses to {source} (r read, w write) were ordered {order or 'none'}, now {now or 'none'}"
    for source in after.alternation:
        if source not in before.alternation:
            return f"{source} is written now and was not before"
    for (source, name), epoch in before.epochs.items():
        now_epoch = after.epochs.get((source, name), epoch)
        if now_epoch != epoch:
            return f"%{name} touched {source} after {epoch} writes, now after {now_epoch}"
    gone = {(source, epoch) for (source, name), epoch in before.epochs.items() if (source, name) not in after.epochs}
    named = {source for source, _ in before.epochs}
    for (source, name), epoch in after.epochs.items():
        if source in named and (source, name) not in before.epochs and (source, epoch) not in gone:
            return f"%{name} touches {source} after {epoch} writes, in place of no access that was there"
    return ""


def _epochs(accesses: Sequence[Access]) -> list[tuple[int, Access]]:
    count = 0
    found: list[tuple[int, Access]] = []
    for access in accesses:
        found.append((count, access))
        count += access.writes
    return found
