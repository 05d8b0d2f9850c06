"""The second door: the same passes behind `torch.compile(model, backend=precede_backend(...))`.

Dynamo hands over a graph of torch functions on its own fake tensors. It is run once more under `make_fx` with our
symbols, so that the result is the same kind of Graph that `capture` gives: ATen as written, inputs in the order
parameters, buffers, caches, batch, module paths, cache writes in place. Mark the batch's sizes with
`torch._dynamo.mark_dynamic` to keep them symbolic.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from precede.model.batch import DIMS

from . import _torch
from .capture import CACHE_DIMS, HINTS, tidy
from .errors import CaptureError
from .graph import Graph
from .manager import Pass, PassContext, PassRecord, run_passes

Compiled = Callable[..., tuple[torch.Tensor]]


def precede_backend(
    pipeline: Sequence[Pass],
    context: PassContext,
    *,
    done: Callable[[Graph, dict[str, PassRecord]], None] | None = None,
    allow_misses: bool = False,
) -> Callable[[fx.GraphModule, list[Any]], Compiled]:
    """A backend that runs `pipeline` on what Dynamo captured; `done` gets the graph and the records.

    The compiled model's forward must be captured as one graph (fullgraph=True). Raises CaptureError if it is not a
    `forward(batch, caches)`.
    """

    def compile_graph(module: fx.GraphModule, example_inputs: list[Any]) -> Compiled:
        graph, order = from_dynamo(module)
        records = run_passes(graph, pipeline, context, allow_misses=allow_misses)
        if done is not None:
            done(graph, records)
        run = graph.callable()

        def compiled(*inputs: Any) -> tuple[torch.Tensor]:
            return (run(*(inputs[i] for i in order)),)

        return compiled

    return compile_graph


def from_dynamo(module: fx.GraphModule) -> tuple[Graph, list[int]]:
    """Our Graph of Dynamo's, and for each of its placeholders the index of Dynamo's input."""
    given = list(module.graph.find_nodes(op="placeholder"))
    named = [_source(_torch.dynamo_source(n)) if _is_tensor(n) else None for n in given]
    ranks = {"parameter": 0, "buffer": 1, "cache": 2, "batch": 3}
    order = sorted((i for i, n in enumerate(named) if n is not None), key=lambda i: ranks[named[i][0]])  # type: ignore[index]
    mode = _torch.fake_mode()
    sizes: dict[str, tuple[str, torch.SymInt]] = {}
    fakes: list[torch.Tensor] = []
    for i in order:
        kind, source = named[i]  # type: ignore[misc]
        value = given[i].meta["example_value"]
        shape = [d if isinstance(d, int) else _size(sizes, mode, d, kind, source, k) for k, d in enumerate(value.shape)]
        stride = value.stride() if all(isinstance(d, int) for d in value.shape) else None
        fakes.append(_torch.empty_fake(mode, shape, stride, value.dtype, value.device))

    def run(*tensors: torch.Tensor) -> Any:
        inputs: list[Any] = [None] * len(given)
        for i, tensor in zip(order, tensors, strict=True):
            inputs[i] = tensor
        for i, node in enumerate(given):
            if named[i] is None:
                name = str(_torch.expression(node.meta["example_value"]))
                inputs[i] = sizes[name][1] if name in sizes else node.meta["example_value"]
        return _Relabelled(module).run(*inputs)

    with mode:
        traced = _torch.trace(run, fakes, stack_traces=False)
    for node, i in zip(traced.graph.find_nodes(op="placeholder"), order, strict=True):
        kind, source = named[i]  # type: ignore[misc]
        role = kind if kind in ("cache", "batch") else "weight"
        node.meta.update(source=source, role=role, ssa=source)
    symbols = {_torch.symbol(size): name for name, size in sizes.values()}
    return tidy(traced.graph, symbols), order


class _Relabelled(fx.Interpreter):
    """Runs Dynamo's graph and marks what each of its nodes becomes with module path and source line."""

    def run_node(self, n: fx.Node) -> Any:
        graph = _torch.live_graph()
        last = next(iter(reversed(graph.nodes)))
        result = super().run_node(n)
        stack = list((n.meta.get("nn_module_stack") or {}).values())
        path = _path(stack[-1][0]).partition(".")[2] if stack else ""
        for node in reversed(graph.nodes):
            if node is last:
                break
            node.meta.setdefault("module", path)
            node.meta.setdefault("stack_trace", n.meta.get("stack_trace"))
        return result


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("example_value"), torch.Tensor)


def _path(expression: str) -> str:
    """`L['self']._modules['layers']._modules['0']` and the like as `self.layers.0`."""
    plain = re.sub(r"\[['\"]?([^'\"\]]+)['\"]?\]", r".\1", expression)
    parts = [p for p in plain.split(".") if p not in ("L", "_modules", "_parameters", "_buffers", "")]
    return ".".join(parts)


def _source(expression: str) -> tuple[str, str]:
    """Kind and name of an input from the Python expression that Dynamo knows it by."""
    first, _, rest = _path(expression).partition(".")
    if first == "self":
        return ("buffer" if "_buffers" in expression else "parameter"), rest
    if first in ("batch", "caches"):
        kind = "batch" if first == "batch" else "cache"
        return kind, f"{kind}.{rest}"
    raise CaptureError(
        f"the compiled function reads {expression}; only forward(batch, caches) of a model can be captured"
    )


def _size(
    sizes: dict[str, tuple[str, torch.SymInt]], mode: Any, dim: Any, kind: str, source: str, axis: int
) -> torch.SymInt:
    """Our symbol for one of Dynamo's, named by the first input that has it."""
    key = str(_torch.expression(dim))
    if key not in sizes:
        field = source.split(".")[1] if kind in ("batch", "cache") else ""
        name = DIMS[field][axis] if kind == "batch" else CACHE_DIMS.get(field)
        if not isinstance(name, str):
            raise CaptureError(f"dimension {axis} of {source} is dynamic; only the batch's and the pools' sizes may be")
        sizes[key] = (name, _torch.new_symbol(mode, name, HINTS[name]))
    return sizes[key][1]
