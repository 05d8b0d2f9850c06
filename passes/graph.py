"""The graph that passes work on: a `torch.fx.Graph` whose every value has a type, a name and a place in the model.

Placeholders come in the order parameters, buffers, cache leaves, batch leaves. Node metadata:

    val           fake tensor(s) or symbolic size; sizes are symbols shared by name (T rows, R requests, ...)
    role, source  placeholders only: "weight" | "cache" | "batch", and `layers.3.ffn.gate.weight`, `cache.window.3`,
                  `batch.token_ids`
    module        path of the module that made the value, "" at the top
    layer         number of the layer it belongs to, or None
    stack_trace   where in the eager source
    ssa           printed name, given once (see names.py)
"""

from __future__ import annotations

import difflib
import functools
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from . import _torch
from .errors import GraphError

META_KEYS = ("val", "role", "source", "module", "layer", "stack_trace", "ssa", "stream")


@dataclass(frozen=True, kw_only=True)
class Access:
    """One op that touches a mutated input."""

    op: str
    node: fx.Node
    writes: bool


class Graph:
    """A flat graph of one step: (weights, caches, batch) -> logits, with cache writes in place."""

    def __init__(self, graph: fx.Graph, symbols: Mapping[sympy.Symbol, str]) -> None:
        self.fx = graph
        self.symbols = dict(symbols)

    def placeholders(self, role: str | None = None) -> list[fx.Node]:
        """Input nodes in order; only those of one role if given."""
        nodes = self.fx.find_nodes(op="placeholder")
        return [n for n in nodes if role is None or n.meta["role"] == role]

    def output(self) -> fx.Node:
        """The node that holds the logits."""
        value = self.fx.output_node().args[0]
        assert isinstance(value, fx.Node)
        return value

    def call_nodes(self, target: Any = None) -> list[fx.Node]:
        """Nodes that compute something, in order; only those calling `target` if given."""
        if target is None:
            return [n for n in self.fx.nodes if n.op == "call_function"]
        return list(self.fx.find_nodes(op="call_function", target=target))

    def node(self, name: str) -> fx.Node:
        """The value printed as `%name`. Raises GraphError with the nearest names."""
        by_name = {n.meta.get("ssa"): n for n in self.fx.nodes}
        if name in by_name:
            return by_name[name]
        near = difflib.get_close_matches(name, [n for n in by_name if n], n=3)
        raise GraphError(f"no value named %{name}; near are {', '.join('%' + n for n in near) or 'none'}")

    def op_counts(self) -> Counter[str]:
        """How often each op occurs; sizes and tuple parts are not counted."""
        return Counter(op_name(n.target) for n in self.call_nodes() if not is_plumbing(n))

    def effects(self) -> dict[str, list[Access]]:
        """For each mutated input, by source, every op that touches it or a view of it, in order."""
        roots = alias_roots(self.fx.nodes)
        mutated = written_roots(self.fx.nodes, roots)
        found: dict[str, list[Access]] = {n.meta["source"]: [] for n in self.placeholders() if n in mutated}
        for node in self.fx.nodes:
            if node.op != "call_function" or is_view(node):
                continue
            written = {r for a in written_args(node) for r in roots[a]}
            for root in dict.fromkeys(r for a in node.all_input_nodes for r in roots[a]):
                if root in mutated and root.op == "placeholder":
                    access = Access(op=op_name(node.target), node=node, writes=root in written)
                    found[root.meta["source"]].append(access)
        return found

    def callable(self) -> Callable[..., torch.Tensor]:
        """The graph as generated Python: flat inputs in placeholder order -> logits."""
        return fx.GraphModule(torch.nn.Module(), self.fx)

    def run(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Execute once. Raises GraphError for a wrong number of inputs."""
        expected = len(self.placeholders())
        if len(inputs) != expected:
            raise GraphError(f"the graph has {expected} inputs (weights, caches, batch), got {len(inputs)}")
        with torch.no_grad():
            return self.callable()(*inputs)

    def copy(self) -> Graph:
        """An independent graph with the same values and names; fake tensors are shared."""
        new = fx.Graph()
        mapping: dict[fx.Node, fx.Node] = {}
        result = new.graph_copy(self.fx, mapping)
        new.output(result)
        return Graph(new, self.symbols)

    def text(self) -> str:
        """The printed form, one line a value."""
        from .text import Snapshot

        return Snapshot.of(self).text()

    def describe(self, value: Any) -> str:
        """The printed type of a value: `f32[T,1]`, `(f32[T,6], i64[T,6])`, `2*T`."""
        return describe(value, self.symbols)


DTYPES = {
    torch.float32: "f32",
    torch.float64: "f64",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.float8_e4m3fn: "f8e4m3",
    torch.float8_e8m0fnu: "f8e8m0",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "b1",
}


def describe(value: Any, symbols: Mapping[sympy.Symbol, str]) -> str:
    """The printed type of a node's `val`; sizes are written with the names in `symbols`."""
    if isinstance(value, torch.Tensor):
        sizes = ",".join(str(d) if isinstance(d, int) else size_text(d, symbols) for d in value.shape)
        return f"{DTYPES.get(value.dtype, str(value.dtype).removeprefix('torch.'))}[{sizes}]"
    if isinstance(value, list | tuple):
        return "(" + ", ".join(describe(v, symbols) for v in value) + ")"
    if _torch.is_symbolic(value):
        return size_text(value, symbols)
    return str(value)


def size_text(size: Any, symbols: Mapping[sympy.Symbol, str]) -> str:
    """A size as text, with symbols by their printed names."""
    return expression_text(_torch.expression(size), symbols).replace(" ", "")


def expression_text(expr: sympy.Expr, symbols: Mapping[sympy.Symbol, str]) -> str:
    """A size expression with symbols by their printed names."""
    if isinstance(expr, sympy.Symbol):
        return symbols.get(expr, str(expr))
    named = {s: sympy.Symbol(symbols[s]) for s in expr.free_symbols if isinstance(s, sympy.Symbol) and s in symbols}
    return str(expr.xreplace(named))


@functools.cache
def op_name(target: Any) -> str:
    """`add` for aten.add.Tensor, `precede.mega_gate` for our own ops, the function's name otherwise."""
    if isinstance(target, _torch.OpOverload):
        name = target._schema.name
        return name.removeprefix("aten::").replace("::", ".")
    return getattr(target, "__name__", str(target))


def is_plumbing(node: fx.Node) -> bool:
    """Whether a node only takes a part of a tuple or computes a size: nothing that runs on a device."""
    return node.target is operator.getitem or _torch.is_symbolic(node.meta.get("val"))


def written_args(node: fx.Node) -> list[fx.Node]:
    """The node's arguments that its schema mutates."""
    if node.op != "call_function" or not isinstance(node.target, _torch.OpOverload):
        return []
    found: list[fx.Node] = []
    for i, name in _written_positions(node.target):
        value = node.args[i] if i < len(node.args) else node.kwargs.get(name)
        found += [v for v in (value if isinstance(value, list | tuple) else [value]) if isinstance(v, fx.Node)]
    return found


@functools.cache
def _written_positions(target: Any) -> tuple[tuple[int, str], ...]:
    arguments = enumerate(target._schema.arguments)
    return tuple((i, a.name) for i, a in arguments if a.alias_info is not None and a.alias_info.is_write)


def is_view(node: fx.Node) -> bool:
    """Whether a node only gives another look at its first argument's storage."""
    if node.target is operator.getitem:
        return True
    return viewed_arg(node) is not None and not written_args(node)


def viewed_arg(node: fx.Node) -> fx.Node | None:
    """The argument whose storage the result may share, by the schema's alias annotations."""
    if node.op != "call_function" or not isinstance(node.target, _torch.OpOverload):
        return None
    for i, name in _viewed_positions(node.target):
        value = node.args[i] if i < len(node.args) else node.kwargs.get(name)
        if isinstance(value, fx.Node):
            cast = node.target._opname == "to" and _dtype(value) != _dtype(node)
            return None if cast or asks_copy(node) else value
    return None


@functools.cache
def _viewed_positions(target: Any) -> tuple[tuple[int, str], ...]:
    """Arguments that a result aliases: annotated and not written, or written and returned (in-place ops)."""
    returned = [r.alias_info for r in target._schema.returns if r.alias_info is not None]
    found: list[tuple[int, str]] = []
    for i, argument in enumerate(target._schema.arguments):
        info = argument.alias_info
        if info is not None and (not info.is_write or any(info.before_set & r.before_set for r in returned)):
            found.append((i, argument.name))
    return tuple(found)


def asks_copy(node: fx.Node) -> bool:
    """Whether a call says `copy=True`, by keyword or by position."""
    if not isinstance(node.target, _torch.OpOverload):
        return False
    for i, argument in enumerate(node.target._schema.arguments):
        if argument.name == "copy":
            return bool(node.args[i] if i < len(node.args) else node.kwargs.get("copy"))
    return False


def _perhaps_viewed(node: fx.Node) -> list[fx.Node]:
    """Arguments whose storage the result may share although the schema does not say so (einsum, dropout, ...)."""
    if node.op != "call_function" or not _hides_views(node.target):
        return []
    dtype = _dtype(node)
    return [a for a in node.all_input_nodes if dtype is None or _dtype(a) in (None, dtype)]


# Composites of which every result is new storage.
_FRESH = {"linear", "matmul", "softmax", "log_softmax", "argsort", "where", "square"}


@functools.cache
def _hides_views(target: Any) -> bool:
    """Whether an op is made of other ops, perhaps views, and its schema annotates nothing."""
    if not isinstance(target, _torch.OpOverload) or target._opname in _FRESH:
        return False
    return _torch.is_composite(target) and all(a.alias_info is None for a in target._schema.arguments)


def _dtype(node: fx.Node) -> torch.dtype | None:
    return getattr(node.meta.get("val"), "dtype", None)


Roots = Mapping[fx.Node, frozenset[fx.Node]]


def alias_roots(nodes: Iterable[fx.Node]) -> Roots:
    """For each node those whose storage it may look at: itself, unless it is a view. Any order of nodes will do."""
    roots: dict[fx.Node, frozenset[fx.Node]] = {}
    for start in nodes:
        pending = [start]
        while pending:
            node = pending[-1]
            source = node.args[0] if node.target is operator.getitem else viewed_arg(node)
            sure = isinstance(source, fx.Node)
            sources = [source] if isinstance(source, fx.Node) else _perhaps_viewed(node)
            unknown = [s for s in sources if s not in roots]
            if unknown and node not in roots:
                pending += unknown
                continue
            pending.pop()
            roots[node] = frozenset().union(*(roots[s] for s in sources), () if sure else (node,))
    return roots


def written_roots(nodes: Iterable[fx.Node], roots: Roots) -> set[fx.Node]:
    """The nodes whose storage some op writes."""
    return {root for n in nodes for a in written_args(n) for root in roots[a]}


def is_pure(node: fx.Node) -> bool:
    """Whether removing an unused node, or merging it with an equal one, changes nothing."""
    if node.op != "call_function":
        return False
    if not isinstance(node.target, _torch.OpOverload):
        return node.target is operator.getitem or _torch.is_symbolic(node.meta.get("val"))
    return _is_pure_op(node.target)


@functools.cache
def _is_pure_op(target: Any) -> bool:
    if target._schema.is_mutable or torch.Tag.nondeterministic_seeded in target.tags:
        return False
    return bool(target._schema.returns)


def erase_dead(graph: fx.Graph, candidates: Iterable[fx.Node] | None = None) -> int:
    """Erase pure nodes without users, in reverse order; returns how many."""
    nodes = list(graph.nodes) if candidates is None else sorted(set(candidates))
    count = 0
    for node in reversed(nodes):
        if not node.users and is_pure(node):
            graph.erase_node(node)
            count += 1
    return count
