"""Runs a pipeline of passes and keeps a record of each: time, matches, misses with reasons, text before and after.

A pass states how many matches the config implies (`expects`); a fusion that vanished is an error, not a slower model.
The manager times, verifies and snapshots, so that passes only rewrite.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

import torch

from precede.model.config import ModelConfig
from precede.model.numerics import Numerics

from .diff import Diff, diff
from .errors import PassError
from .graph import Graph
from .names import name_values
from .text import Snapshot
from .verify import State, effects_kept, verify

if TYPE_CHECKING:
    from .pattern import Match, Miss

VerifyLevel = Literal["off", "structure", "numerics"]
Tier = Literal["exact", "tolerance"]


class Pass(Protocol):
    """One rewriting of a graph, in place.

    name       lower-case letters, digits and _, beginning with a letter; files of an engine are called so
    numerics   "exact" keeps every bit of the result on the reference backend; "tolerance" may sum in another order
    """

    name: str
    numerics: Tier

    def expects(self, graph: Graph, context: PassContext) -> int | None:
        """How many matches the config implies; None: any number."""
        ...

    def run(self, graph: Graph, context: PassContext) -> None:
        """Rewrite; report through `context.hit` and `context.miss`."""
        ...


@dataclass(kw_only=True)
class PassContext:
    """What passes may know besides the graph, and where they report.

    example   makes fresh flat inputs of the graph (weights, caches, batch); needed by verify="numerics" only
    """

    config: ModelConfig
    numerics: Numerics
    example: Callable[[], Sequence[torch.Tensor]] | None = None
    matches: int = 0
    misses: list[Miss] = field(default_factory=list)

    def hit(self, match: Match) -> None:
        """One match was rewritten."""
        self.matches += 1

    def miss(self, miss: Miss) -> None:
        """A place that nearly fits, and why it does not."""
        self.misses.append(miss)

    def count(self, matches: int) -> None:
        """Several rewritings without a pattern."""
        self.matches += matches


@dataclass(frozen=True, kw_only=True)
class PassRecord:
    """What one pass did."""

    name: str
    numerics: Tier
    seconds: float
    matches: int
    expected: int | None
    misses: tuple[Miss, ...]
    nodes_before: int
    nodes_after: int
    ops_before: Mapping[str, int]
    ops_after: Mapping[str, int]
    effects_kept: bool
    before: Snapshot
    after: Snapshot

    @cached_property
    def diff(self) -> Diff:
        """Folded hunks; `str()` prints them, `.json()` gives plain data."""
        return diff(self.before.lines(), self.after.lines())

    def json(self) -> dict[str, Any]:
        """The record as plain data, without the texts."""
        return {
            "name": self.name,
            "numerics": self.numerics,
            "seconds": round(self.seconds, 4),
            "matches": self.matches,
            "expected": self.expected,
            "misses": [{"node": m.node, "reason": m.reason} for m in self.misses],
            "nodes_before": self.nodes_before,
            "nodes_after": self.nodes_after,
            "ops_changed": self.ops_changed(),
            "effects_kept": self.effects_kept,
        }

    def ops_changed(self) -> dict[str, int]:
        """Op -> how many more (or, negative, fewer) there are after the pass."""
        names = {**self.ops_before, **self.ops_after}
        change = {n: self.ops_after.get(n, 0) - self.ops_before.get(n, 0) for n in names}
        return {n: c for n, c in change.items() if c}


def run_passes(
    graph: Graph,
    pipeline: Sequence[Pass],
    context: PassContext,
    *,
    disable: Collection[str] = (),
    stop_after: str | None = None,
    verify_level: VerifyLevel = "structure",
    allow_misses: bool = False,
) -> dict[str, PassRecord]:
    """Run the passes in order on `graph`, in place; records by pass name.

    Raises PassError for a pass that lacks a part or is named oddly, for an unknown name in `disable` or `stop_after`,
    for fewer or more matches than a pass expects (unless `allow_misses`), and, at verify level "numerics", for an exact
    pass that changes a bit; VerifyError for an illegal graph. Values that no pass named have names afterwards.
    """
    check_passes(pipeline)
    names = [p.name for p in pipeline]
    for name in [*disable, *([stop_after] if stop_after else [])]:
        if name not in names:
            raise PassError(f"there is no pass {name!r}; the passes are {', '.join(names)}")
    if verify_level == "numerics" and context.example is None:
        raise PassError('verify "numerics" runs the graph, so the context needs `example` inputs')
    records: dict[str, PassRecord] = {}
    state, snapshot = State.of(graph), Snapshot.of(graph)
    result = _evaluate(graph, context) if verify_level == "numerics" else None
    for rewriting in pipeline:
        if rewriting.name not in disable:
            record, state = _run_one(graph, rewriting, context, state, snapshot, verify_level)
            snapshot = record.after
            records[rewriting.name] = record
            if not allow_misses:
                _check_matches(record)
            if result is not None:
                result = _compare(rewriting, result, _evaluate(graph, context))
        if rewriting.name == stop_after:
            break
    name_values(graph.fx)
    return records


def check_passes(pipeline: Sequence[Pass]) -> None:
    """Raise PassError for a pass without one of its four parts, or with a name that is no identifier."""
    for rewriting in pipeline:
        for part in ("name", "numerics", "expects", "run"):
            value = getattr(rewriting, part, None)
            if value is None or (part in ("expects", "run") and not callable(value)):
                raise PassError(
                    f"the pass {getattr(rewriting, 'name', None) or rewriting!r} has no {part}; a pass needs name, "
                    "numerics, expects(graph, context) and run(graph, context)"
                )
        name = rewriting.name
        if not isinstance(name, str) or not re.fullmatch(r"[a-z][a-z0-9_]*", name):
            raise PassError(f"a pass is named {name!r}; a name is lower-case letters, digits and _, as in mega_gate")
        if rewriting.numerics not in get_args(Tier):
            raise PassError(f"{name} has numerics {rewriting.numerics!r}; it is 'exact' or 'tolerance'")


def _run_one(
    graph: Graph, rewriting: Pass, context: PassContext, state: State, before: Snapshot, level: VerifyLevel
) -> tuple[PassRecord, State]:
    context.matches, context.misses = 0, []
    expected = rewriting.expects(graph, context)
    nodes, ops = len(graph.fx.nodes), graph.op_counts()
    start = time.perf_counter()
    rewriting.run(graph, context)
    name_values(graph.fx)
    seconds = time.perf_counter() - start
    after = State.of(graph) if level == "off" else verify(graph, rewriting.name, state)
    record = PassRecord(
        name=rewriting.name,
        numerics=rewriting.numerics,
        seconds=seconds,
        matches=context.matches,
        expected=expected,
        misses=tuple(context.misses),
        nodes_before=nodes,
        nodes_after=len(graph.fx.nodes),
        ops_before=Counter(ops),
        ops_after=graph.op_counts(),
        effects_kept=effects_kept(state, after),
        before=before,
        after=Snapshot.of(graph),
    )
    return record, after


def _check_matches(record: PassRecord) -> None:
    if record.expected is None or record.matches == record.expected:
        return
    why = "; ".join(map(str, record.misses[:3])) or "no place came near"
    raise PassError(f"{record.name} expected {record.expected} matches and made {record.matches}; {why}")


Outcome = list[torch.Tensor]


def _evaluate(graph: Graph, context: PassContext) -> Outcome:
    """The result and every mutated input after one run."""
    assert context.example is not None
    inputs = [t.clone() for t in context.example()]
    result = graph.run(*inputs)
    written = {source for source in graph.effects()}
    return [result, *(t for n, t in zip(graph.placeholders(), inputs, strict=True) if n.meta["source"] in written)]


def _compare(rewriting: Pass, before: Outcome, after: Outcome) -> Outcome:
    if rewriting.numerics == "exact":
        for a, b in zip(before, after, strict=True):
            if not torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)):
                raise PassError(f"{rewriting.name} promises equal bits, and the result or a cache differs")
    return after
