"""The reference backend: a graph saved as it is, run by its operators' reference functions on any device."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Node

from precede.passes.graph import Graph, size_text

from .errors import BundleError
from .operators import operator_name
from .part import DTYPES, GETITEM, LAYOUTS, MEMORY_FORMATS, InputSpec, NodeSpec, OutputSpec, PartSpec

_FUNCTIONS: dict[Any, str] = {
    operator.getitem: GETITEM,
    operator.add: "sym.add",
    operator.sub: "sym.sub",
    operator.mul: "sym.mul",
    operator.floordiv: "sym.floordiv",
    operator.mod: "sym.mod",
    operator.neg: "sym.neg",
    torch.sym_max: "sym.max",
    torch.sym_min: "sym.min",
}


def serialise(
    graph: Graph, *, name: str = "main", ranges: Mapping[str, tuple[int, int | None]] | None = None
) -> PartSpec:
    """The graph as a part. `ranges` bounds symbols by printed name; else they are at least 1, logit rows at least 0.

    Raises BundleError naming the node whose target, argument or value a part cannot hold.
    """
    return _Serialiser(graph, name).part(ranges or {})


class _Serialiser:
    def __init__(self, graph: Graph, name: str) -> None:
        self.graph = graph
        self.name = name
        self.names: dict[Node, str] = {}
        self.device: torch.device | None = None

    def part(self, ranges: Mapping[str, tuple[int, int | None]]) -> PartSpec:
        inputs, nodes, outputs = [], [], []
        for node in self.graph.fx.nodes:
            if node.op == "placeholder":
                inputs.append(self._input(node))
            elif node.op == "call_function":
                nodes.append(self._node(node))
            elif node.op == "output":
                outputs = self._outputs(node)
            else:
                raise self._error(node, f"op {node.op} cannot be saved; a graph has call_function nodes only")
        symbols = {s: ranges.get(s, (0 if s == "L" else 1, None)) for s in self.graph.symbols.values()}
        return PartSpec(name=self.name, symbols=symbols, inputs=inputs, nodes=nodes, outputs=outputs)

    def _input(self, node: Node) -> InputSpec:
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            raise self._error(node, f"input is a {type(value).__name__}; inputs are tensors")
        self.device = self.device or value.device
        dtype, shape = self._tensor(node, value)
        for dim in shape:
            if isinstance(dim, str) and dim not in self.graph.symbols.values():
                raise self._error(node, f"input has size {dim}; sizes of inputs are integers or single symbols")
        return InputSpec(
            name=self._define(node), role=node.meta["role"], source=node.meta["source"], dtype=dtype, shape=shape
        )

    def _node(self, node: Node) -> NodeSpec:
        target = _FUNCTIONS.get(node.target) or operator_name(node.target)
        if target is None:
            raise self._error(node, f"target {node.target} is no operator of aten, prims or precede")
        args = [self._argument(node, a) for a in node.args]
        kwargs = {key: self._argument(node, a) for key, a in node.kwargs.items()}
        dtype, shape = self._value(node, node.meta.get("val"))
        stream = node.meta.get("stream", 0)
        return NodeSpec(
            name=self._define(node), target=target, args=args, kwargs=kwargs, dtype=dtype, shape=shape, stream=stream
        )

    def _outputs(self, node: Node) -> list[OutputSpec]:
        results = node.args[0] if isinstance(node.args[0], tuple | list) else (node.args[0],)
        specs = []
        for result in results:
            if not isinstance(result, Node) or not isinstance(result.meta.get("val"), torch.Tensor):
                raise self._error(node, f"output {result} is no tensor")
            dtype, shape = self._tensor(result, result.meta["val"])
            specs.append(OutputSpec(name=self.names[result], dtype=dtype, shape=shape))
        return specs

    def _define(self, node: Node) -> str:
        name = str(node.meta["ssa"]).removeprefix("%")
        self.names[node] = name
        return name

    def _value(self, node: Node, value: Any) -> tuple[Any, Any]:
        if value is None or (isinstance(value, tuple | list) and not value):
            return None, None
        if isinstance(value, torch.Tensor):
            return self._tensor(node, value)
        if isinstance(value, int | torch.SymInt) and not isinstance(value, bool):
            return "int", None
        if isinstance(value, tuple | list) and all(isinstance(v, torch.Tensor) for v in value):
            dtypes, shapes = zip(*(self._tensor(node, v) for v in value), strict=True)
            return list(dtypes), list(shapes)
        raise self._error(node, f"value is a {type(value).__name__}; a program holds tensors and sizes")

    def _tensor(self, node: Node, value: torch.Tensor) -> tuple[str, list[int | str]]:
        dtype = str(value.dtype).removeprefix("torch.")
        if dtype not in DTYPES:
            raise self._error(node, f"dtype {dtype} cannot be saved")
        return dtype, [self._size(d) for d in value.shape]

    def _size(self, size: int | torch.SymInt) -> int | str:
        return size if isinstance(size, int) else size_text(size, self.graph.symbols)

    def _argument(self, node: Node, value: Any) -> Any:
        if isinstance(value, Node):
            return {"ref": self.names[value]}
        if value is None or isinstance(value, bool | int | str):
            return value
        if isinstance(value, float):
            return value if math.isfinite(value) else {"float": str(value)}
        if isinstance(value, list | tuple):
            return [self._argument(node, v) for v in value]
        if isinstance(value, torch.device):
            if value == self.device:
                return {"device": "program"}
            if value.type == "cpu":
                return {"device": "cpu"}
            raise self._error(node, f"device {value} is neither the model's ({self.device}) nor the host")
        for tag, kind, known in (
            ("dtype", torch.dtype, DTYPES),
            ("layout", torch.layout, LAYOUTS),
            ("memory_format", torch.memory_format, MEMORY_FORMATS),
        ):
            if isinstance(value, kind) and (text := str(value).removeprefix("torch.")) in known:
                return {tag: text}
        raise self._error(node, f"argument {value!r} of type {type(value).__name__} cannot be saved")

    def _error(self, node: Node, message: str) -> BundleError:
        return BundleError(f"part {self.name}, node {node.meta.get('ssa', node.name)}: {message}")
