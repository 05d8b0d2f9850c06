"""Symbolic sizes as nodes: one node a size, computed from the inputs' shapes at the top of the graph.

A trace asks any tensor for its shape, so the same size appears many times and may hang on an interior value, which a
pass could then not replace. Here every size is rebuilt from the shapes of placeholders.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import sympy
import torch
from torch import fx

from . import _torch


def unify_sizes(graph: fx.Graph) -> None:
    """Replace all nodes of one symbolic size by one, right after the placeholders. Sizes of other forms stay."""
    builder = SizeBuilder(graph)
    for node in list(graph.nodes):
        if node.op != "call_function" or not isinstance(node.meta.get("val"), torch.SymInt) or node in builder.made:
            continue
        new = builder.build(node.meta["val"])
        if isinstance(new, fx.Node):
            node.replace_all_uses_with(new)
            graph.erase_node(node)


class SizeBuilder:
    """Makes, and finds again, the node of a size expression."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.nodes: dict[sympy.Expr, fx.Node] = {}
        self.made: set[fx.Node] = set()
        self.holders: dict[sympy.Expr, tuple[fx.Node, int, torch.SymInt]] = {}
        self.last: fx.Node | None = None
        for node in graph.find_nodes(op="placeholder"):
            self.last = node
            for dim, size in enumerate(getattr(node.meta["val"], "shape", ())):
                if isinstance(size, torch.SymInt):
                    self.holders.setdefault(_torch.expression(size), (node, dim, size))
        while self.last is not None and isinstance(self.last.next.meta.get("val"), torch.SymInt):
            self.last = self.last.next
            self.made.add(self.last)
            self.nodes.setdefault(_torch.expression(self.last.meta["val"]), self.last)

    def build(self, size: torch.SymInt) -> fx.Node | None:
        """The node of a size; None if it is neither a sum, product nor floor quotient of input sizes."""
        found = self._build(_torch.expression(size))
        return None if found is None or isinstance(found[0], int) else found[0]

    def _build(self, expr: sympy.Expr) -> tuple[fx.Node | int, Any] | None:
        if isinstance(expr, sympy.Integer):
            return int(expr), int(expr)
        if expr in self.nodes:
            return self.nodes[expr], self.nodes[expr].meta["val"]
        if expr in self.holders:
            node, dim, size = self.holders[expr]
            return self._new(expr, torch.ops.aten.sym_size.int, (node, dim), size)
        form = _form(expr)
        if form is None:
            return None
        function, parts = form
        built = [self._build(p) for p in parts]
        if any(b is None for b in built):
            return None
        (node, value), *rest = [b for b in built if b is not None]
        for number, (other, other_value) in enumerate(rest, 2):
            value = function(value, other_value)
            node = self._new(expr if number == len(parts) else None, function, (node, other), value)[0]
        return node, value

    def _new(self, expr: sympy.Expr | None, target: Any, args: tuple[Any, ...], value: Any) -> tuple[fx.Node, Any]:
        assert self.last is not None
        with self.graph.inserting_after(self.last):
            node = self.graph.call_function(target, args)
        node.meta.update(val=value, module="")
        self.last = node
        self.made.add(node)
        if expr is not None:
            self.nodes[expr] = node
        return node, value


def _form(expr: sympy.Expr) -> tuple[Callable[[Any, Any], Any], tuple[Any, ...]] | None:
    name = type(expr).__name__
    if isinstance(expr, sympy.Mul | sympy.Add):
        return (operator.mul if isinstance(expr, sympy.Mul) else operator.add), expr.args
    if name in ("FloorDiv", "CleanDiv"):
        return operator.floordiv, expr.args
    if isinstance(expr, sympy.Pow) and isinstance(expr.args[1], sympy.Integer) and int(expr.args[1]) >= 2:
        return operator.mul, (expr.args[0],) * int(expr.args[1])
    return None
