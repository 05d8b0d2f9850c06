"""A pattern is an eager function: traced like the model, found as a part of the graph, with holes for what may differ.

    ROUTE = Pattern(route, tensors={"x": ..., "weight": ...}, scalars={"topk": (2, 3), "scale": (1.5, 2.5)},
                    dynamic={"x": {0: "T"}}, anchor=aten.softplus.default)
    found = ROUTE.find(graph)
    found.matches[0]["x"], found.matches[0]["topk"]     a node, a number
    found.misses[0].reason                              at sqrt: want aten.sqrt.default, got aten.softmax.int

A scalar is traced with two values; literals that follow it become holes, also `k + 3` or `2 * k`; a third value checks
that they follow it in a line. Sizes named in `dynamic` fit any size, static or symbolic, the same everywhere. `add` and
`mul` commute. A value inside the pattern must not be used outside, unless it is a constant of the pattern or a mere
cast or view of an input. What the pattern reads must not be written between its ops.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from . import _torch
from .canonicalize import simplify
from .errors import PatternError
from .graph import Graph, alias_roots, describe, expression_text, is_pure, op_name, written_args
from .names import names_of
from .sizes import unify_sizes

aten = torch.ops.aten
_COMMUTE = {aten.add.Tensor, aten.mul.Tensor}
_MERE = {
    "to",
    "view",
    "reshape",
    "unsqueeze",
    "squeeze",
    "transpose",
    "flatten",
    "unflatten",
    "expand",
    "select",
    "slice",
}


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """What a pattern is traced with in place of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True, kw_only=True)
class Miss:
    """Why the graph does not fit: at which op of the pattern, what it wants there, what the graph has."""

    at: str
    want: str
    got: str
    node: str = ""
    depth: int = 0

    @property
    def reason(self) -> str:
        """`at sqrt: want aten.sqrt.default, got aten.softmax.int`."""
        return f"at {self.at}: want {self.want}, got {self.got}"

    def __str__(self) -> str:
        return f"%{self.node}: {self.reason}" if self.node else self.reason


@dataclass(frozen=True, kw_only=True)
class Match:
    """One occurrence: graph nodes of the pattern's ops, what its holes hold, and the values it returns."""

    pattern: Pattern
    nodes: Mapping[fx.Node, fx.Node]
    holes: Mapping[str, Any]
    outputs: tuple[fx.Node, ...]

    def __getitem__(self, name: str) -> Any:
        return self.holes[name]

    def inside(self) -> list[fx.Node]:
        """Graph nodes that the pattern's ops stand for, in graph order."""
        return sorted({self.nodes[p] for p in self.pattern.interior})


@dataclass(frozen=True, kw_only=True)
class Found:
    """All occurrences in a graph, in order, and the near ones that do not fit, nearest first."""

    matches: tuple[Match, ...]
    misses: tuple[Miss, ...]


@dataclass(frozen=True)
class _Hole:
    """A literal that follows a scalar: value = slope * scalar + offset."""

    name: str
    slope: Any = 1
    offset: Any = 0


@dataclass
class _State:
    nodes: dict[fx.Node, fx.Node]
    holes: dict[str, Any]
    sizes: list[tuple[Any, Any, str]]

    def fork(self) -> _State:
        return _State(dict(self.nodes), dict(self.holes), list(self.sizes))

    def become(self, other: _State) -> None:
        self.nodes, self.holes, self.sizes = other.nodes, other.holes, other.sizes


class Pattern:
    """An eager function to look for; see the module's text.

    Raises PatternError if scalars change its structure, a literal does not follow them in a line, or it has no op.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        tensors: Mapping[str, TensorSpec],
        scalars: Mapping[str, tuple[Any, Any]] | None = None,
        dynamic: Mapping[str, Mapping[int, str]] | None = None,
        anchor: Any = None,
        fixed: Mapping[str, Any] | None = None,
    ) -> None:
        self.name = getattr(function, "__name__", "pattern")
        self.anchor = anchor
        scalars, dynamic, fixed = scalars or {}, dynamic or {}, fixed or {}
        base = {name: pair[0] for name, pair in scalars.items()}
        self.graph, self.symbols = _trace(function, tensors, {**base, **fixed}, dynamic)
        nodes = list(self.graph.nodes)
        self.args: dict[fx.Node, Any] = {n: n.args for n in nodes}
        self.kwargs: dict[fx.Node, Any] = {n: dict(n.kwargs) for n in nodes}
        for name, (first, second) in scalars.items():
            other = self._traced_alike(function, tensors, {**base, name: second, **fixed}, dynamic, name, first, second)
            for n, o in zip(nodes, other, strict=True):
                self.args[n] = self._fold(self.args[n], o.args, name, first, second)
                self.kwargs[n] = {k: self._fold(v, o.kwargs[k], name, first, second) for k, v in self.kwargs[n].items()}
            third = _third(first, second)
            if third is None:
                continue
            other = self._traced_alike(function, tensors, {**base, name: third, **fixed}, dynamic, name, first, third)
            for n, o in zip(nodes, other, strict=True):
                self._check_line([self.args[n], *self.kwargs[n].values()], [o.args, *o.kwargs.values()], name, third)
        self.inputs = dict(zip(self.graph.find_nodes(op="placeholder"), tensors, strict=True))
        sized = {n for n in nodes if _torch.is_symbolic(n.meta.get("val"))}
        self.interior = [n for n in nodes if n.op == "call_function" and n not in sized]
        if not self.interior:
            raise PatternError(f"pattern {self.name} has no op to look for; let it compute something")
        result = self.graph.output_node().args[0]
        results = result if isinstance(result, list | tuple) else (result,)
        self.outputs = tuple(r for r in results if isinstance(r, fx.Node))
        self.shareable = self._shareable()

    def _fold(self, a: Any, b: Any, name: str, first: Any, second: Any) -> Any:
        if isinstance(a, fx.Node | _Hole):
            return a
        if isinstance(a, list | tuple):
            return type(a)(self._fold(x, y, name, first, second) for x, y in zip(a, b, strict=True))
        if type(a) is type(b) and a == b:
            return a
        if (a, b) == (first, second):
            return _Hole(name)
        if isinstance(first, int) and isinstance(a, int) and isinstance(b, int) and (b - a) % (second - first) == 0:
            slope = (b - a) // (second - first)
            return _Hole(name, slope, a - slope * first)
        raise PatternError(
            f"pattern {self.name}: the literals {a!r} and {b!r} do not follow {name} = {first!r}, {second!r}"
        )

    def _traced_alike(
        self,
        function: Callable[..., Any],
        tensors: Mapping[str, TensorSpec],
        values: Mapping[str, Any],
        dynamic: Mapping[str, Mapping[int, str]],
        name: str,
        first: Any,
        now: Any,
    ) -> list[fx.Node]:
        other = list(_trace(function, tensors, values, dynamic)[0].nodes)
        if [n.target for n in other] != [n.target for n in self.graph.nodes]:
            raise PatternError(f"pattern {self.name}: {name} = {first} and {now} give different ops")
        return other

    def _check_line(self, a: Any, b: Any, name: str, third: Any) -> None:
        """With `third` for the scalar, the literals `b` must be what the holes in `a` say."""
        if isinstance(a, list | tuple):
            if len(a) != len(b):
                raise PatternError(f"pattern {self.name}: {name} = {third} gives another number of literals")
            for x, y in zip(a, b, strict=True):
                self._check_line(x, y, name, third)
        elif isinstance(a, _Hole):
            if a.name == name and b != a.slope * third + a.offset:
                raise PatternError(
                    f"pattern {self.name}: a literal is {b!r} for {name} = {third!r}, not "
                    f"{a.slope} * {name} + {a.offset}; literals must follow a scalar in a line"
                )
        elif not isinstance(a, fx.Node) and repr(a) != repr(b):
            raise PatternError(
                f"pattern {self.name}: a literal is {b!r} for {name} = {third!r} and {a!r} otherwise; literals must "
                "follow a scalar in a line"
            )

    def _shareable(self) -> set[fx.Node]:
        """Interior nodes that may be used outside: constants, and casts and views of inputs."""
        free: set[fx.Node] = set()
        for n in self.interior:
            reads = [a for a in n.all_input_nodes if not _torch.is_symbolic(a.meta.get("val"))]
            constant = all(a in free and a not in self.inputs for a in reads) and not any(
                a in self.inputs for a in reads
            )
            mere = op_name(n.target) in _MERE and all(a in free or a in self.inputs for a in reads)
            if is_pure(n) and (constant or mere):
                free.add(n)
        return free - set(self.outputs)

    def find(self, graph: Graph) -> Found:
        """Every occurrence that does not overlap an earlier one."""
        counts = Counter(n.target for n in graph.fx.nodes if n.op == "call_function")
        anchor = self._anchor(counts)
        if anchor is None:
            want = op_name(self.anchor or self.interior[0].target)
            return Found(matches=(), misses=(Miss(at=want, want="at least one", got="none in the graph"),))
        matches: list[Match] = []
        misses: list[Miss] = []
        used: set[fx.Node] = set()
        names = names_of(graph.fx.nodes)
        search = _Search(self, graph, names)
        for node in graph.fx.find_nodes(op="call_function", target=anchor.target):
            result = search.at(anchor, node)
            if isinstance(result, Miss):
                misses.append(result)
                continue
            core = {result.nodes[p] for p in self.interior if p not in self.shareable}
            if not used & core:
                used |= core
                matches.append(result)
        return Found(matches=tuple(matches), misses=tuple(sorted(misses, key=lambda m: -m.depth)))

    def _anchor(self, counts: Counter[Any]) -> fx.Node | None:
        """The op to start from: the rarest in the graph; one that is missing only if the caller named it."""
        present = [n for n in self.interior if counts[n.target] and n not in self.shareable]
        if self.anchor is not None:
            present = [n for n in present if n.target is self.anchor]
        return min(present, key=lambda n: counts[n.target], default=None)


class _Search:
    """One pattern in one graph."""

    def __init__(self, pattern: Pattern, graph: Graph, names: Mapping[fx.Node, str]) -> None:
        self.pattern, self.graph, self.names = pattern, graph, names
        self.roots = alias_roots(graph.fx.nodes)
        self.writers = [
            (n, {r for a in written for r in self.roots[a]}) for n in graph.fx.nodes if (written := written_args(n))
        ]

    def at(self, anchor: fx.Node, node: fx.Node) -> Match | Miss:
        """Match with `anchor` standing for `node`: arguments first, then forward through users."""
        p, state = self.pattern, _State({}, {}, [])
        miss = self._unify(state, anchor, node)
        if miss is None:
            miss = self._grow(state)
        if miss is None:
            miss = self._sizes(state) or self._leaks(state) or self._torn(state)
        if miss is not None:
            return Miss(
                at=miss.at, want=miss.want, got=miss.got, node=self.names.get(node, node.name), depth=len(state.nodes)
            )
        outputs = tuple(state.nodes[o] for o in p.outputs)
        return Match(pattern=p, nodes=state.nodes, holes=state.holes, outputs=outputs)

    def _grow(self, state: _State) -> Miss | None:
        pending = [n for n in self.pattern.interior if n not in state.nodes]
        while pending:
            nearest: Miss | None = None
            waiting: list[fx.Node] = []
            for n in pending:
                if n in state.nodes:
                    continue
                miss = self._forward(state, n)
                if miss is not None:
                    waiting.append(n)
                    nearest = nearest or (miss if miss.got else None)
            if len(waiting) == len(pending):
                first = waiting[0]
                return nearest or Miss(at=op_name(first.target), want=str(first.target), got="nothing connected to it")
            pending = waiting
        return None

    def _forward(self, state: _State, wanted: fx.Node) -> Miss | None:
        """Find `wanted` among the users of a matched argument. A Miss with empty `got`: nothing to start from yet."""
        known = [a for a in wanted.all_input_nodes if a in state.nodes and not _is_size(a)]
        if not known:
            return Miss(at=op_name(wanted.target), want=str(wanted.target), got="")
        source = min(known, key=lambda a: len(state.nodes[a].users))
        miss: Miss | None = None
        others: list[str] = []
        for user in state.nodes[source].users:
            if user.target is not wanted.target:
                others.append(str(user.target))
                continue
            trial = state.fork()
            why = self._unify(trial, wanted, user)
            if why is None:
                state.become(trial)
                return None
            miss = miss or why
        got = ", ".join(dict.fromkeys(others)) or "no user"
        return miss or Miss(at=op_name(wanted.target), want=str(wanted.target), got=got)

    def _unify(self, state: _State, p: fx.Node, g: fx.Node) -> Miss | None:
        where = self.pattern.inputs.get(p) or op_name(p.target)
        if p in state.nodes:
            same = state.nodes[p] is g
            return None if same else Miss(at=where, want=self._show(state.nodes[p]), got=self._show(g))
        if p in self.pattern.inputs:
            return self._input(state, p, g, where)
        if g.op != "call_function" or p.target is not g.target:
            return Miss(at=where, want=str(p.target), got=str(g.target) if g.op == "call_function" else self._show(g))
        wanted, given = list(self.pattern.args[p]), list(g.args)
        if len(wanted) != len(given):
            return Miss(at=where, want=f"{len(wanted)} arguments", got=str(len(given)))
        first: Miss | None = None
        # `alpha` scales the second summand only.
        commutes = p.target in _COMMUTE and self.pattern.kwargs[p].get("alpha", 1) == 1
        for order in (wanted, [wanted[1], wanted[0], *wanted[2:]]) if commutes else (wanted,):
            trial = state.fork() if commutes else state
            trial.nodes[p] = g
            miss = self._bind_all(trial, order, given, where) or self._keywords(trial, p, g, where)
            if miss is None:
                state.become(trial)
                return None
            first = first or miss
        return first

    def _keywords(self, state: _State, p: fx.Node, g: fx.Node, where: str) -> Miss | None:
        wanted = self.pattern.kwargs[p]
        for key in {**wanted, **g.kwargs}:
            if key not in ("device", "layout", "pin_memory"):
                miss = self._bind(state, wanted.get(key), g.kwargs.get(key), f"{where}.{key}")
                if miss is not None:
                    return miss
        return None

    def _input(self, state: _State, p: fx.Node, g: fx.Node, where: str) -> Miss | None:
        want, got = p.meta["val"], g.meta.get("val")
        shown = Miss(at=where, want=describe(want, self.pattern.symbols), got=self.graph.describe(got))
        if not isinstance(got, torch.Tensor) or got.dtype != want.dtype or got.dim() != want.dim():
            return shown
        for a, b in zip(want.shape, got.shape, strict=True):
            if isinstance(a, torch.SymInt):
                state.sizes.append((_torch.expression(a), _torch.expression(b), where))
            elif isinstance(b, torch.SymInt) or a != b:
                return shown
        state.nodes[p] = g
        state.holes[where] = g
        return None

    def _bind_all(self, state: _State, wanted: Sequence[Any], given: Sequence[Any], where: str) -> Miss | None:
        for u, v in zip(wanted, given, strict=True):
            miss = self._bind(state, u, v, where)
            if miss is not None:
                return miss
        return None

    def _bind(self, state: _State, p: Any, g: Any, where: str) -> Miss | None:
        if isinstance(p, _Hole):
            return self._hole(state, p, g, where)
        if isinstance(p, fx.Node):
            if _is_size(p):
                size = g.meta.get("val") if isinstance(g, fx.Node) else g
                if not (isinstance(size, int | torch.SymInt) and not isinstance(size, bool)):
                    return Miss(at=where, want="a size", got=self._show(g))
                state.sizes.append((_torch.expression(p.meta["val"]), _torch.expression(size), where))
                return None
            if isinstance(g, fx.Node):
                return self._unify(state, p, g)
            return Miss(at=where, want=op_name(p.target) if p not in self.pattern.inputs else "a tensor", got=repr(g))
        if isinstance(p, list | tuple):
            if not isinstance(g, list | tuple) or len(p) != len(g):
                return Miss(at=where, want=repr(p), got=self._show(g))
            return self._bind_all(state, p, g, where)
        same = type(p) is type(g) and repr(p) == repr(g)
        return None if same else Miss(at=where, want=self._literal(p), got=self._show(g))

    def _hole(self, state: _State, hole: _Hole, g: Any, where: str) -> Miss | None:
        if isinstance(g, fx.Node | list | tuple) or g is None:
            return Miss(at=where, want=f"a number for {hole.name}", got=self._show(g))
        value = g
        if (hole.slope, hole.offset) != (1, 0):
            value, rest = divmod(g - hole.offset, hole.slope)
            if rest:
                return Miss(at=where, want=f"{hole.slope} * {hole.name} + {hole.offset}", got=repr(g))
        known = state.holes.setdefault(hole.name, value)
        return None if known == value else Miss(at=where, want=f"{hole.name} = {known}", got=repr(value))

    def _sizes(self, state: _State) -> Miss | None:
        """Symbols take the size they stand for; every other size must then agree."""
        bound: dict[Any, Any] = {}
        for p, g, where in state.sizes:
            if isinstance(p, sympy.Symbol) and bound.setdefault(p, g) != g:
                return Miss(at=where, want=f"size {self._text(bound[p])}", got=self._text(g))
        for p, g, where in state.sizes:
            if isinstance(p, sympy.Symbol):
                continue
            if sympy.expand(p.xreplace(bound) - g) != 0:
                return Miss(at=where, want=f"size {self._text(p.xreplace(bound))}", got=self._text(g))
        return None

    def _leaks(self, state: _State) -> Miss | None:
        p = self.pattern
        inside = {state.nodes[n] for n in p.interior}
        free = {state.nodes[n] for n in (*p.outputs, *p.shareable)}
        for n in p.interior:
            g = state.nodes[n]
            if g in free:
                continue
            outside = next((u for u in g.users if u not in inside), None)
            if outside is not None:
                return Miss(
                    at=op_name(n.target), want="no use outside the pattern", got=f"used by {self._show(outside)}"
                )
        return None

    def _torn(self, state: _State) -> Miss | None:
        """Whether a foreign op writes what the pattern reads, between the pattern's first op and its last."""
        p = self.pattern
        inside = {state.nodes[n] for n in p.interior}
        shareable = {state.nodes[n] for n in p.shareable}
        written = {root for _, roots in self.writers for root in roots}
        reading = [(n, r) for n in inside for a in n.all_input_nodes for r in self.roots[a] & written]
        read = {r for _, r in reading}
        first, last = min((inside - shareable) | {n for n, _ in reading}), max(inside)
        for writer, roots in self.writers:
            if writer not in inside and roots & read and first < writer < last:
                at = next(n for n in p.interior if any(m is state.nodes[n] and r in roots for m, r in reading))
                return Miss(
                    at=op_name(at.target),
                    want="no write between the pattern's ops to what it reads",
                    got=f"written by {self._show(writer)}",
                )
        return None

    def _text(self, size: Any) -> str:
        return expression_text(size, self.graph.symbols)

    def _literal(self, a: Any) -> str:
        return str(a) if isinstance(a, torch.dtype) else repr(a)

    def _show(self, a: Any) -> str:
        if isinstance(a, fx.Node):
            return f"%{self.names.get(a, a.name)}" if a.op != "output" else "the result"
        if isinstance(a, list | tuple):
            return "[" + ", ".join(map(self._show, a)) + "]"
        return self._literal(a)


def _third(first: Any, second: Any) -> int | float | None:
    """Another value of a scalar, beyond two integers or between two floats; None if there is no such."""
    if type(first) is int and type(second) is int:
        return max(first, second) + abs(second - first)
    return (first + second) / 2 if isinstance(first, float) and isinstance(second, float) else None


def _is_size(n: fx.Node) -> bool:
    return _torch.is_symbolic(n.meta.get("val"))


def _trace(
    function: Callable[..., Any],
    tensors: Mapping[str, TensorSpec],
    scalars: Mapping[str, Any],
    dynamic: Mapping[str, Mapping[int, str]],
) -> tuple[fx.Graph, dict[sympy.Symbol, str]]:
    mode = _torch.fake_mode()
    symbols: dict[str, torch.SymInt] = {}
    inputs: list[torch.Tensor] = []
    for name, spec in tensors.items():
        shape: list[Any] = list(spec.shape)
        for dim, symbol in dynamic.get(name, {}).items():
            if symbol not in symbols:
                symbols[symbol] = _torch.new_symbol(mode, symbol, 1009 + 2 * len(symbols))
            shape[dim] = symbols[symbol]
        inputs.append(_torch.empty_fake(mode, shape, None, spec.dtype, "cpu"))
    with mode:
        traced = _torch.trace(lambda *a: function(*a, **scalars), inputs, stack_traces=False)
    unify_sizes(traced.graph)
    simplify(traced.graph)
    return traced.graph, {_torch.symbol(size): name for name, size in symbols.items()}
