"""Small graphs from plain functions, for tests of what needs no model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from precede.passes import _torch
from precede.passes.capture import tidy
from precede.passes.graph import Graph
from precede.passes.names import name_values


def graph_of(
    function: Callable[..., Any], *, named: bool = True, caches: tuple[str, ...] = (), **inputs: tuple[Any, ...]
) -> Graph:
    """Trace `function(**inputs)`; an input is a shape with an optional dtype last, a string in it a symbolic size."""
    mode = _torch.fake_mode()
    symbols: dict[str, torch.SymInt] = {}
    fakes = []
    for spec in inputs.values():
        dtype = spec[-1] if isinstance(spec[-1], torch.dtype) else torch.float32
        shape: list[Any] = [d for d in spec if not isinstance(d, torch.dtype)]
        for i, d in enumerate(shape):
            if isinstance(d, str):
                if d not in symbols:
                    symbols[d] = _torch.new_symbol(mode, d, 1009 + 2 * len(symbols))
                shape[i] = symbols[d]
        fakes.append(_torch.empty_fake(mode, shape, None, dtype, "cpu"))
    with mode:
        traced = _torch.trace(lambda *a: function(*a), fakes)
    for node, name in zip(traced.graph.find_nodes(op="placeholder"), inputs, strict=True):
        node.meta.update(source=name, ssa=name, role="cache" if name in caches else "weight")
    graph = tidy(traced.graph, symbol_names(symbols))
    if named:
        name_values(graph.fx)
    return graph


def symbol_names(symbols: Mapping[str, torch.SymInt]) -> dict[Any, str]:
    return {_torch.expression(size): name for name, size in symbols.items()}
