"""Putting new ops in the place of matched ones.

A new node goes where the last matched op stood, or before the first use of one of its outputs if that comes earlier;
the graph is then sorted again if something it reads comes later. Its outputs inherit type, name, module, layer and
source line of the values they replace. A match that reads another match's outputs is led to the new values.
"""

from __future__ import annotations

import heapq
import operator
from collections.abc import Sequence
from typing import Any

from torch import fx
from torch.fx.node import map_arg

from . import _torch
from .errors import RewriteError
from .graph import Graph, alias_roots, erase_dead, is_view, written_roots
from .names import name_values
from .pattern import Match

_INHERITED = ("ssa", "module", "layer", "stack_trace", "stream")


class Rewriter:
    """Replaces matches in one graph; call `finish()` after the last one."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.replaced: dict[fx.Node, fx.Node] = {}

    def now(self, value: Any) -> Any:
        """A value of a match as it stands in the graph by now."""
        if isinstance(value, fx.Node):
            while value in self.replaced:
                value = self.replaced[value]
            return value
        return map_arg(value, self.now) if isinstance(value, list | tuple) else value

    def replace(self, match: Match, target: Any, args: Sequence[Any]) -> list[fx.Node]:
        """Put one call of `target` in place of the match; its results stand for the match's outputs, in order.

        Returns the nodes of the new outputs. Raises RewriteError if the op's results have other types than the values
        they replace.
        """
        outputs = [self.now(o) for o in match.outputs]
        inside = [n for n in match.inside() if n not in self.replaced]
        at = self._position(inside, outputs)
        with self.graph.fx.inserting_before(at):
            call = self.graph.fx.call_function(target, tuple(self.now(a) for a in args))
        call.meta.update({k: outputs[0].meta[k] for k in ("module", "layer", "stack_trace") if k in outputs[0].meta})
        value = _result_type(call)
        call.meta["val"] = value
        if isinstance(value, tuple | list):
            with self.graph.fx.inserting_before(at):
                new = [self.graph.fx.call_function(operator.getitem, (call, i)) for i in range(len(value))]
            for node, part in zip(new, value, strict=True):
                node.meta["val"] = part
        else:
            new = [call]
        if len(new) != len(outputs):
            raise RewriteError(
                f"{target} gives {len(new)} values, the pattern {match.pattern.name} returns {len(outputs)}"
            )
        for old, node in zip(outputs, new, strict=True):
            self._inherit(old, node, match)
        erase_dead(self.graph.fx, inside)
        return new

    def finish(self) -> None:
        """Sort what must be sorted, drop what lost its last user, name what is new."""
        sort_stably(self.graph)
        erase_dead(self.graph.fx)
        name_values(self.graph.fx)

    def _position(self, inside: list[fx.Node], outputs: list[fx.Node]) -> fx.Node:
        last = inside[-1]
        interior = set(inside)
        users = [u for o in outputs for u in o.users if u not in interior]
        return min([last.next, *users])

    def _inherit(self, old: fx.Node, new: fx.Node, match: Match) -> None:
        before, after = self.graph.describe(old.meta["val"]), self.graph.describe(new.meta["val"])
        if before != after:
            name = old.meta.get("ssa", old.name)
            raise RewriteError(f"{match.pattern.name}: the new op gives {after} for %{name}, which is {before}")
        new.meta.update({k: old.meta[k] for k in _INHERITED if k in old.meta})
        new.meta["val"] = old.meta["val"]
        old.meta.pop("ssa", None)
        old.replace_all_uses_with(new)
        self.replaced[old] = new


def _result_type(call: fx.Node) -> Any:
    """What the op's fake gives for the node's arguments."""
    args, kwargs = map_arg((call.args, call.kwargs), lambda n: n.meta["val"])
    tensors = [n.meta["val"] for n in call.all_input_nodes if isinstance(n.meta["val"], _torch.FakeTensor)]
    if not tensors:
        raise RewriteError(f"{call.target} reads no tensor; a replacement must read the values of its match")
    target: Any = call.target
    with tensors[0].fake_mode:
        return target(*args, **kwargs)


def sort_stably(graph: Graph) -> None:
    """Restore topological order, moving as little as possible; accesses to a mutated value keep their order."""
    nodes = list(graph.fx.nodes)
    position = {n: i for i, n in enumerate(nodes)}
    if all(position[a] < position[n] for n in nodes for a in n.all_input_nodes):
        return
    after: dict[fx.Node, set[fx.Node]] = {n: set(n.all_input_nodes) for n in nodes}
    for chain in _accesses(nodes):
        for earlier, later in zip(chain, chain[1:], strict=False):
            after[later].add(earlier)
    for node in nodes:
        if node.op == "output":
            after[node] |= set(nodes) - {node}
    waiting = {n: len(reads) for n, reads in after.items()}
    readers: dict[fx.Node, list[fx.Node]] = {n: [] for n in nodes}
    for node, reads in after.items():
        for read in reads:
            readers[read].append(node)
    ready = [position[n] for n in nodes if not waiting[n]]
    heapq.heapify(ready)
    order: list[fx.Node] = []
    while ready:
        node = nodes[heapq.heappop(ready)]
        order.append(node)
        for reader in readers[node]:
            waiting[reader] -= 1
            if not waiting[reader]:
                heapq.heappush(ready, position[reader])
    if len(order) != len(nodes):
        stuck = next(n for n in nodes if waiting[n])
        raise RewriteError(f"%{stuck.meta.get('ssa', stuck.name)} depends on itself; two replacements read each other")
    for earlier, later in zip(order, order[1:], strict=False):
        if earlier.next is not later:
            earlier.append(later)


def _accesses(nodes: list[fx.Node]) -> list[list[fx.Node]]:
    """For each mutated storage the nodes that touch it, in the present order."""
    roots = alias_roots(nodes)
    mutated = written_roots(nodes, roots)
    chains: dict[fx.Node, list[fx.Node]] = {root: [] for root in mutated}
    for node in nodes:
        if is_view(node):
            continue
        for root in {r for a in node.all_input_nodes for r in roots[a]} & mutated:
            chains[root].append(node)
    return list(chains.values())
