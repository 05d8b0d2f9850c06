"""Every private torch name that passes/ uses, in one place; works on torch 2.11 to 2.14.

Elsewhere in passes/ only documented names appear. A torch upgrade that moves one of these is repaired here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sympy
import torch
from torch import fx
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental.proxy_tensor import (
    disable_proxy_modes_tracing,
    get_proxy_mode,
    get_proxy_slot,
    make_fx,
    track_tensor_tree,
)
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

__all__ = [
    "FakeTensor",
    "FakeTensorMode",
    "OpOverload",
    "dynamo_source",
    "empty_fake",
    "empty_like_fake",
    "expression",
    "fake_mode",
    "guards",
    "is_composite",
    "is_symbolic",
    "make_fx",
    "new_symbol",
    "node_of",
    "record_helper_lines",
    "symbol",
    "trace",
    "track",
    "untraced",
]

OpOverload = torch._ops.OpOverload
_TORCH_FOLDER = str(Path(torch.__file__).parent)


def fake_mode() -> FakeTensorMode:
    """A fake tensor mode with a fresh shape environment: equal sizes stay different symbols, data cannot be read."""
    env = ShapeEnv(duck_shape=False, allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)
    return FakeTensorMode(shape_env=env, allow_non_fake_inputs=True)


def new_symbol(mode: FakeTensorMode, name: str, hint: int) -> torch.SymInt:
    """A new symbolic size of at least 2; `hint` is the number that stands for it if code asks."""
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
    carrier = mode.from_tensor(
        torch.empty(hint, device="meta"), symbolic_context=context, source=ConstantSource(f"size_{name}")
    )
    size = carrier.shape[0]
    assert isinstance(size, torch.SymInt)
    return size


def empty_fake(
    mode: FakeTensorMode, shape: Any, stride: Any, dtype: torch.dtype, device: torch.device | str
) -> torch.Tensor:
    """A fake tensor that shares nothing with anybody; `stride` None means contiguous."""
    with mode, untraced():
        if stride is None:
            return torch.empty(tuple(shape), dtype=dtype, device=device)
        return torch.empty_strided(tuple(shape), tuple(stride), dtype=dtype, device=device)


def empty_like_fake(mode: FakeTensorMode, value: torch.Tensor) -> torch.Tensor:
    """A fake tensor of the same sizes, strides and offset that shares nothing with anybody."""
    offset = value.storage_offset()
    if isinstance(offset, int) and offset == 0:
        return empty_fake(mode, value.shape, value.stride(), value.dtype, value.device)
    with mode, untraced():
        extent = offset + 1 + sum(size * stride for size, stride in zip(value.shape, value.stride(), strict=True))
        storage = torch.empty((extent,), dtype=value.dtype, device=value.device)
        return storage.as_strided(value.shape, value.stride(), offset)


def is_symbolic(value: object) -> bool:
    """Whether `value` is a symbolic size, flag or number."""
    return isinstance(value, torch.SymInt | torch.SymBool | torch.SymFloat)


def expression(value: Any) -> sympy.Expr:
    """The sympy expression of a size, symbolic or not."""
    return value.node.expr if is_symbolic(value) else sympy.Integer(int(value))


def symbol(value: torch.SymInt) -> sympy.Symbol:
    """The symbol of a size made by `new_symbol`."""
    expr = expression(value)
    assert isinstance(expr, sympy.Symbol)
    return expr


def guards(mode: FakeTensorMode) -> list[tuple[str, str]]:
    """Conditions on symbolic sizes that the traced Python asked for, as (condition, place in the source).

    Torch's own questions whether some size is 1 concern layout and broadcasting; the ops ask again when the graph runs,
    so only equalities among these would specialise it.
    """
    env = mode.shape_env
    assert env is not None
    found: list[tuple[str, str]] = []
    for guard in env.guards:
        frame = getattr(guard.sloc, "framework_loc", None)
        filename = getattr(frame, "filename", str(frame))
        if filename.startswith(_TORCH_FOLDER) and isinstance(guard.expr, sympy.Ne):
            continue
        found.append((str(guard.expr), f"{filename}:{getattr(frame, 'lineno', '?')}"))
    return found


def is_composite(target: Any) -> bool:
    """Whether an op is written in other ops, for every backend alike."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(target.name(), "CompositeImplicitAutograd")


def dynamo_source(node: fx.Node) -> str:
    """The Python expression by which Dynamo knows a placeholder, `L['batch'].token_ids`."""
    argument = node.meta.get("grapharg")
    source = getattr(argument, "source", None)
    name = getattr(source, "name", "")
    return str(name() if callable(name) else name)


def trace(function: Callable[..., Any], inputs: list[Any], *, stack_traces: bool = True) -> fx.GraphModule:
    """Run `function` on fake `inputs` and record pre-dispatch ATen, mutation included, without gradients."""
    with torch.no_grad(), _use_lazy_graph_module(True):  # nobody runs the traced module: only its graph is taken
        return make_fx(function, tracing_mode="real", pre_dispatch=True, record_stack_traces=stack_traces)(*inputs)


@contextmanager
def untraced() -> Iterator[None]:
    """Run code inside a trace without recording it."""
    if get_proxy_mode() is None:
        yield
        return
    with disable_proxy_modes_tracing():
        yield


def _tracer() -> Any:
    mode = get_proxy_mode()
    assert mode is not None, "only meaningful while a trace is running"
    return mode.tracer


def live_graph() -> fx.Graph:
    """The graph of the trace that is running."""
    return _tracer().graph


def record_helper_lines() -> None:
    """In the running trace, let stack traces show the functions that forwards call, not the forwards alone."""
    _tracer()._record_forward_stack_traces_only = False


def node_of(tensor: torch.Tensor) -> fx.Node | None:
    """The node that stands for `tensor` in the running trace; None for a tensor that the trace does not know."""
    slot = get_proxy_slot(tensor, _tracer(), None)
    return None if slot is None else slot.proxy.node


def track(tensor: torch.Tensor, node: fx.Node) -> None:
    """From now on `tensor` stands for `node` in the running trace."""
    tracer = _tracer()
    track_tensor_tree(tensor, fx.Proxy(node, tracer), constant=None, tracer=tracer)
