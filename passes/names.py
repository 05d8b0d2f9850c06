"""Printed names: module path and op, given once and never changed.

`%L3.ffn.gate.sum` is the first sum that layer 3's gate makes, `%L3.ffn.gate.sum_2` the second; the parts of a tuple are
`%L3.ffn.gate.topk.0` and `.1`. A pass hands names on to what replaces a value, so an edit never renames a line that it
does not touch, and equal edits of forty layers read alike.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable
from typing import Any

from torch import fx

from . import _torch
from .graph import op_name

_LAYER = re.compile(r"^layers\.(\d+)(?:\.|$)")


def assign_names(nodes: Iterable[fx.Node], taken: Iterable[str] = ()) -> dict[fx.Node, str]:
    """Names for the nodes that have none yet, in order; `taken` and the existing ones are avoided."""
    nodes = list(nodes)
    used = {*taken, *(n.meta["ssa"] for n in nodes if "ssa" in n.meta)}
    given: dict[fx.Node, str] = {}
    count: dict[str, int] = {}
    for node in nodes:
        if "ssa" in node.meta or node.op == "output":
            continue
        base = base_name(node, given)
        name, number = base, count.get(base, 1)
        while name in used:
            number += 1
            name = f"{base}_{number}"
        count[base] = number
        used.add(name)
        given[node] = name
    return given


def name_values(graph: fx.Graph) -> None:
    """Give every value without a name its name, for good."""
    for node, name in assign_names(graph.nodes).items():
        node.meta["ssa"] = name


def base_name(node: fx.Node, given: dict[fx.Node, str] | None = None) -> str:
    """The name of a value before equal ones are numbered."""
    if node.op == "placeholder":
        return node.meta.get("source", node.name)
    if node.target is operator.getitem:
        whole, part = node.args[0], node.args[1]
        assert isinstance(whole, fx.Node)
        return f"{whole.meta.get('ssa') or (given or {}).get(whole, whole.name)}.{part}"
    if _torch.is_symbolic(node.meta.get("val")):
        return "size"
    module = _LAYER.sub(lambda m: f"L{m[1]}.", node.meta.get("module", "")).rstrip(".")
    op = op_name(node.target).rpartition(".")[2].strip("_")
    return f"{module}.{op}" if module else op


def names_of(nodes: Iterable[Any]) -> dict[fx.Node, str]:
    """Each node's name as it would print now: its own, or the one it would get."""
    nodes = list(nodes)
    return {**{n: n.meta["ssa"] for n in nodes if "ssa" in n.meta}, **assign_names(nodes)}
