"""Drop what carries no meaning, merge what is equal, and name the rest.

Finds    no-op casts, views and copies; assertions; unused values; functional all-reduce + wait; equal pure values
Puts     nothing new but `precede.all_reduce(x, "tp")` for a functional collective pair
Keeps    bits (a copy that changes strides or alignment stays, and so does `x + 0.0`, which turns -0 into +0), memory
         effects (nothing merges across a write), and layers apart: equal values of two layers are not merged, so that
         layers of one kind stay alike

Patterns go through `simplify` too: a pattern only matches what was cleaned the same way.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, Literal

import torch
from torch import fx

from . import _torch
from .graph import Graph, alias_roots, asks_copy, erase_dead, is_pure, written_args, written_roots
from .manager import PassContext
from .names import name_values

aten = torch.ops.aten

# These give their input, or a view of it, if nothing changes.
_VIEWS = {
    aten.to.dtype,
    aten.to.device,
    aten.to.dtype_layout,
    aten.alias.default,
    aten.contiguous.default,
    aten.detach.default,
    aten.expand.default,
    aten.flatten.using_ints,
    aten.permute.default,
    aten.reshape.default,
    aten.slice.Tensor,
    aten.squeeze.dim,
    aten.transpose.int,
    aten.unflatten.int,
    aten.view.default,
}
# These always copy.
_COPIES = {aten.clone.default, aten.lift_fresh_copy.default, aten._to_copy.default}
_ASSERTIONS = {"_assert_async", "_assert_scalar", "_assert_tensor_metadata", "sym_constrain_range_for_size"}


class Canonicalize:
    """The first pass; see the module's text."""

    name = "canonicalize"
    numerics: Literal["exact", "tolerance"] = "exact"

    def expects(self, graph: Graph, context: PassContext) -> int | None:
        """Any number of clean-ups is fine."""
        return None

    def run(self, graph: Graph, context: PassContext) -> None:
        """Clean the graph in place and name its values."""
        context.count(simplify(graph.fx))
        name_values(graph.fx)


def simplify(graph: fx.Graph) -> int:
    """Clean a traced graph in place; returns the number of nodes that went."""
    before = len(graph.nodes)
    _drop_assertions(graph)
    _pair_collectives(graph)
    _drop_no_ops(graph)
    _merge_equal(graph)
    erase_dead(graph)
    return before - len(graph.nodes)


def _drop_assertions(graph: fx.Graph) -> None:
    for node in list(graph.nodes):
        if node.op == "call_function" and getattr(node.target, "_opname", "") in _ASSERTIONS and not node.users:
            graph.erase_node(node)


def _pair_collectives(graph: fx.Graph) -> None:
    for wait in list(graph.nodes):
        if wait.op != "call_function" or str(wait.target) != "_c10d_functional.wait_tensor.default":
            continue
        reduce = wait.args[0]
        if (
            str(reduce.target) != "_c10d_functional.all_reduce.default"
            or len(reduce.users) > 1
            or reduce.args[1] != "sum"
        ):
            continue
        with graph.inserting_before(wait):
            new = graph.call_function(torch.ops.precede.all_reduce.default, (reduce.args[0], "tp"))
        new.meta = dict(wait.meta)
        wait.replace_all_uses_with(new)
        graph.erase_node(wait)
        graph.erase_node(reduce)


def _drop_no_ops(graph: fx.Graph) -> None:
    roots = alias_roots(graph.nodes)
    mutated = written_roots(graph.nodes, roots)
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target not in _VIEWS | _COPIES:
            continue
        source = node.args[0]
        if not isinstance(source, fx.Node) or not _same_layout(source.meta.get("val"), node.meta.get("val")):
            continue
        if (node.target in _COPIES or asks_copy(node)) and (roots[source] | roots[node]) & mutated:
            continue
        node.replace_all_uses_with(source)
        graph.erase_node(node)


def _same_layout(a: Any, b: Any) -> bool:
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return False
    if a.dtype != b.dtype or a.device != b.device or a.dim() != b.dim():
        return False
    pairs: list[tuple[Any, Any]] = [*zip(a.shape, b.shape, strict=True), *zip(a.stride(), b.stride(), strict=True)]
    pairs.append((a.storage_offset(), b.storage_offset()))
    return all(_torch.expression(x) == _torch.expression(y) for x, y in pairs)


def _merge_equal(graph: fx.Graph) -> None:
    """Within a layer, or with a value of no layer: equal op, equal arguments, no write to what it reads in between."""
    roots = alias_roots(graph.nodes)
    mutated = written_roots(graph.nodes, roots)
    epoch: dict[fx.Node, int] = defaultdict(int)
    seen: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        for argument in written_args(node):
            for root in roots[argument]:
                epoch[root] += 1
        if not is_pure(node) or _unmergeable(node) or any(r.op != "placeholder" for r in roots[node] & mutated):
            continue
        reads = tuple(sum(epoch[root] for root in roots[a]) for a in node.all_input_nodes)
        key = (node.target, _key(node.args), _key(node.kwargs), reads)
        for layer in dict.fromkeys((None, node.meta.get("layer"))):
            first = seen.get((layer, key))
            if first is not None:
                node.replace_all_uses_with(first)
                graph.erase_node(node)
                break
        else:
            seen[node.meta.get("layer"), key] = node


def _unmergeable(node: fx.Node) -> bool:
    return getattr(node.target, "_opname", "").startswith(("empty", "new_empty"))


def _key(a: Any) -> Any:
    """Hashable and exact: 1, 1.0 and True differ, and so do 0.0 and -0.0."""
    if isinstance(a, fx.Node):
        return a
    if isinstance(a, list | tuple):
        return ("list", *map(_key, a))
    if isinstance(a, dict):
        return tuple((k, _key(v)) for k, v in sorted(a.items()))
    return type(a).__name__, repr(a)
