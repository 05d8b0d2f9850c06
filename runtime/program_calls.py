"""Quicker ways to call the operators that a step calls most.

`torch.ops.aten.add.Tensor(x, y)` converts every argument by the operator's schema at run time; `torch.add(x, y)` comes
to the same operator through a generated binding, in half the time for a tiny tensor. The table holds functions whose
positional arguments are the operator's, and that call exactly this operator when the first one is a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from precede.lowering.part import NodeSpec

BINDINGS: dict[str, Callable[..., Any]] = {
    "aten.add.Tensor": torch.add,
    "aten.amax.default": torch.amax,
    "aten.bmm.default": torch.bmm,
    "aten.cat.default": torch.cat,
    "aten.clamp.default": torch.clamp,
    "aten.div.Tensor": torch.div,
    "aten.exp.default": torch.exp,
    "aten.flatten.using_ints": torch.flatten,
    "aten.index_select.default": torch.index_select,
    "aten.matmul.default": torch.matmul,
    "aten.mean.dim": torch.mean,
    "aten.mul.Tensor": torch.mul,
    "aten.neg.default": torch.neg,
    "aten.reshape.default": torch.reshape,
    "aten.rsqrt.default": torch.rsqrt,
    "aten.select.int": torch.select,
    "aten.sigmoid.default": torch.sigmoid,
    "aten.softmax.int": torch.softmax,
    "aten.square.default": torch.square,
    "aten.stack.default": torch.stack,
    "aten.sub.Tensor": torch.sub,
    "aten.sum.dim_IntList": torch.sum,
    "aten.transpose.int": torch.transpose,
    "aten.unsqueeze.default": torch.unsqueeze,
    "aten.where.ScalarOther": torch.where,
    "aten.where.self": torch.where,
}


def quick_call(node: NodeSpec) -> Callable[..., Any] | None:
    """The function to call instead of the node's operator; None where only the operator itself will do."""
    if node.kwargs or not node.args:
        return None
    first = node.args[0]
    tensors = first if isinstance(first, list) else [first]
    if not all(isinstance(value, Mapping) and "ref" in value for value in tensors):
        return None
    return BINDINGS.get(node.target)
