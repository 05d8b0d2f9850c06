"""The printed form of a graph: one line a value, `%L3.ffn.gate.sum:f32[T,1] = sum(%L3.ffn.gate.gather, [-1], True)`.

Parts of a tuple stand on the left, sizes are written by their symbols, `end` is the largest int64, `@s1` a stream.
`device`, `layout` and `pin_memory` are the same everywhere and not printed.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from . import _torch
from .graph import DTYPES, Graph, describe, op_name, size_text
from .names import assign_names

END = 2**63 - 1
_HIDDEN = ("device", "layout", "pin_memory")


@dataclass(frozen=True, slots=True)
class Line:
    """One printed line; `layer` is the number of the layer it belongs to."""

    layer: int | None
    text: str


@dataclass(frozen=True, slots=True)
class _Record:
    node: fx.Node
    op: str
    target: Any
    args: Any
    kwargs: Any
    name: str | None
    value: Any
    layer: int | None
    stream: int | None


class Snapshot:
    """A graph's text as of now, rendered when first read; later edits of the graph do not change it."""

    def __init__(self, records: list[_Record], symbols: Mapping[sympy.Symbol, str]) -> None:
        self._records, self._symbols = records, symbols
        self._lines: list[Line] | None = None

    @classmethod
    def of(cls, graph: Graph) -> Snapshot:
        """Remember every node; costs microseconds a node."""
        records = [
            _Record(
                n, n.op, n.target, n.args, n.kwargs, n.meta.get("ssa"), n.meta.get("val"), n.meta.get("layer"),
                n.meta.get("stream"),
            )
            for n in graph.fx.nodes
        ]  # fmt: skip
        return cls(records, graph.symbols)

    def text(self) -> str:
        """All lines."""
        return "\n".join(line.text for line in self.lines())

    def lines(self) -> list[Line]:
        """The lines, in graph order."""
        if self._lines is None:
            self._lines = self._render()
        return self._lines

    def _render(self) -> list[Line]:
        # A value that was named after this snapshot was taken prints under that name in both texts.
        known = {r.node: r.name or r.node.meta.get("ssa") for r in self._records}
        fresh = assign_names([r.node for r in self._records], [name for name in known.values() if name])
        names = {node: name or fresh.get(node, node.name) for node, name in known.items()}
        parts: dict[fx.Node, dict[int, _Record]] = {}
        for r in self._records:
            if r.target is operator.getitem:
                parts.setdefault(r.args[0], {})[r.args[1]] = r
        printer = _Printer(names, {r.node: r.value for r in self._records}, self._symbols)
        return [
            Line(r.layer, printer.line(r, parts.get(r.node, {})))
            for r in self._records
            if r.op != "placeholder" and r.target is not operator.getitem and not _torch.is_symbolic(r.value)
        ]


class _Printer:
    def __init__(
        self, names: Mapping[fx.Node, str], values: Mapping[fx.Node, Any], symbols: Mapping[sympy.Symbol, str]
    ) -> None:
        self.names, self.values, self.symbols = names, values, symbols
        self.types: dict[int, str] = {}

    def line(self, r: _Record, parts: Mapping[int, _Record]) -> str:
        if r.op == "output":
            return f"return {self.argument(r.args[0])}"
        arguments = [self.argument(a) for a in r.args]
        arguments += [f"{k}={self.argument(v)}" for k, v in r.kwargs.items() if k not in _HIDDEN]
        call = f"{op_name(r.target)}({', '.join(arguments)})" + (f"    @s{r.stream}" if r.stream else "")
        if isinstance(r.value, list | tuple):
            left = [
                f"%{self.names[parts[i].node]}:{self.type(v)}" if i in parts else "_" for i, v in enumerate(r.value)
            ]
            return f"{', '.join(left)} = {call}" if left else call
        return call if r.value is None else f"%{self.names[r.node]}:{self.type(r.value)} = {call}"

    def type(self, value: Any) -> str:
        key = id(value)
        if key not in self.types:
            self.types[key] = describe(value, self.symbols)
        return self.types[key]

    def argument(self, a: Any) -> str:
        if isinstance(a, fx.Node):
            value = self.values.get(a)
            return size_text(value, self.symbols) if _torch.is_symbolic(value) else f"%{self.names.get(a, a.name)}"
        if isinstance(a, list | tuple):
            return "[" + ", ".join(map(self.argument, a)) + "]"
        if isinstance(a, torch.dtype):
            return DTYPES.get(a, str(a).removeprefix("torch."))
        if isinstance(a, int) and not isinstance(a, bool) and a == END:
            return "end"
        return repr(a)
