"""A checked part as one flat Python function.

A line a node; every identifier is made here (`v0` values, `w0` weights, `f0` operators, `c0` constants) and every
operator and constant becomes a global of the function, so no text of the file is part of the source. Values are deleted
after their last use: memory stays bounded by what is alive, as in eager code.
"""

from __future__ import annotations

import builtins
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from precede.lowering.part import GETITEM, NodeSpec, PartSpec, references

from .program_calls import quick_call
from .program_check import SIZE

_ARITHMETIC = {
    "sym.add": "{} + {}",
    "sym.sub": "{} - {}",
    "sym.mul": "{} * {}",
    "sym.floordiv": "{} // {}",
    "sym.mod": "{} % {}",
    "sym.neg": "-{}",
    "sym.max": "max({}, {})",
    "sym.min": "min({}, {})",
}
# The device of the bound weights; one global, filled in when they are bound.
DEVICE = "device"


@dataclass(frozen=True, kw_only=True)
class StepSource:
    """The generated function, before weights are bound.

    names       globals: operators and constants
    operators   global -> target
    weights     global -> the weight's source
    """

    text: str
    code: types.CodeType
    names: Mapping[str, Any]
    operators: Mapping[str, str]
    weights: Mapping[str, str]
    node_of_line: Mapping[int, NodeSpec]

    def function(self, names: Mapping[str, Any]) -> Any:
        """`step(caches, batch)` with `names` added to the globals."""
        return types.FunctionType(self.code, {**self.names, **names})

    def failed_node(self, error: BaseException) -> NodeSpec | None:
        """The node whose line raised `error`."""
        trace = error.__traceback__
        while trace is not None:
            if trace.tb_frame.f_code is self.code:
                return self.node_of_line.get(trace.tb_lineno)
            trace = trace.tb_next
        return None


def generate(part: PartSpec, operators: Mapping[str, torch._ops.OpOverload]) -> StepSource:
    """Write and compile the function of a part that `check_part` has accepted and whose operators it gave."""
    return _Writer(part, operators).write()


class _Writer:
    def __init__(self, part: PartSpec, operators: Mapping[str, torch._ops.OpOverload]) -> None:
        self.part = part
        self.operators = operators
        # Torch imports modules in the name of the calling frame, so the frame needs the ordinary builtins.
        self.names: dict[str, Any] = {"__builtins__": builtins}
        self.values: dict[str, str] = {}
        self.called: dict[tuple[str, bool], str] = {}
        self.constants: dict[str, str] = {}
        self.weights: dict[str, str] = {}
        self.lines = ["def step(caches, batch):"]

    def write(self) -> StepSource:
        nodes = self._live_nodes()
        last_use = self._last_uses(nodes)
        used = last_use.keys() | {o.name for o in self.part.outputs}
        self._write_inputs(used)
        dying: dict[int, list[str]] = {}
        for name, position in last_use.items():
            if name not in self.values:
                dying.setdefault(position, []).append(name)
        node_of_line: dict[int, NodeSpec] = {}
        for position, node in enumerate(nodes):
            call = self._call(node)
            if node.name in used:
                self.values[node.name] = name = f"v{len(self.values)}"
                call = f"{name} = {call}"
            self.lines.append(f"    {call}")
            node_of_line[len(self.lines)] = node
            if position in dying:
                self.lines.append(f"    del {', '.join(self.values[name] for name in dying[position])}")
        self.lines.append(f"    return {', '.join(self.values[o.name] for o in self.part.outputs)}")
        text = "\n".join([*self.lines, ""])
        scope: dict[str, Any] = {}
        exec(compile(text, f"<part {self.part.name}>", "exec"), {}, scope)
        return StepSource(
            text=text,
            code=scope["step"].__code__,
            names=self.names,
            operators={name: target for (target, _), name in self.called.items()},
            weights=self.weights,
            node_of_line=node_of_line,
        )

    def _live_nodes(self) -> list[NodeSpec]:
        """All operators, which may have effects, and what plumbing they or the outputs need."""
        needed = {o.name for o in self.part.outputs}
        live: list[NodeSpec] = []
        for node in reversed(self.part.nodes):
            if node.name in self.operators or node.name in needed:
                needed.update(references([node.args, list(node.kwargs.values())]))
                live.append(node)
        return live[::-1]

    def _last_uses(self, nodes: list[NodeSpec]) -> dict[str, int]:
        uses: dict[str, int] = {}
        for position, node in enumerate(nodes):
            for name in references([node.args, list(node.kwargs.values())]):
                uses[name] = position
        for output in self.part.outputs:
            uses.pop(output.name, None)
        return uses

    def _write_inputs(self, used: set[str]) -> None:
        for spec in self.part.inputs:
            if spec.name not in used:
                continue
            if spec.role == "weight":
                self.values[spec.name] = name = f"w{len(self.weights)}"
                self.weights[name] = spec.source
                continue
            self.values[spec.name] = name = f"v{len(self.values)}"
            _, field, *index = spec.source.split(".")
            read = f"caches.{field}[{int(index[0])}]" if index else f"batch.{field}"
            self.lines.append(f"    {name} = {read}")

    def _call(self, node: NodeSpec) -> str:
        if node.target == GETITEM:
            return f"{self._value(node.args[0])}[{self._value(node.args[1])}]"
        if node.target in _ARITHMETIC:
            return _ARITHMETIC[node.target].format(*(self._value(a) for a in node.args))
        if node.target == SIZE:
            return f"{self._value(node.args[0])}.size({self._value(node.args[1])})"
        op = self.operators[node.name]
        quick = quick_call(node)
        called = (node.target, quick is not None)
        if called not in self.called:
            self.called[called] = name = f"f{len(self.called)}"
            self.names[name] = quick or op
        arguments = [self._value(a) for a in node.args]
        # The keyword is spelled as the schema spells it; check_part found the file's keys among these.
        keywords = [a.name for a in op._schema.arguments if a.name in node.kwargs]
        arguments += [f"{key}={self._value(node.kwargs[key])}" for key in keywords]
        return f"{self.called[called]}({', '.join(arguments)})"

    def _value(self, value: Any) -> str:
        if value is None or isinstance(value, bool):
            return repr(value)
        if isinstance(value, int):
            return f"({value:d})" if value < 0 else f"{value:d}"
        if isinstance(value, Mapping) and "ref" in value:
            return self.values[value["ref"]]
        if value == {"device": "program"}:
            return DEVICE
        if isinstance(value, list) and any(True for _ in references(value)):
            return f"[{', '.join(self._value(item) for item in value)}]"
        key = repr(value)
        if key not in self.constants:
            self.constants[key] = name = f"c{len(self.constants)}"
            self.names[name] = _constant(value)
        return self.constants[key]


def _constant(value: Any) -> Any:
    if isinstance(value, list):
        return [_constant(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    ((tag, content),) = value.items()
    if tag == "float":
        return float(content)
    return torch.device(content) if tag == "device" else getattr(torch, content)
