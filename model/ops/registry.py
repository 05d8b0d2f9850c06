"""The dialect `precede::*`: each op is a reference function, a schema, a fake, an input generator and a tolerance.

An op's reference is what the CPU runs and what every kernel is tested against. Leaf ops are the only code of the model
that may loop over or branch on data; a graph shows them as one node.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

NAMESPACE = "precede"
_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")

Inputs = Callable[[torch.Generator], tuple[Any, ...]]


@dataclass(frozen=True, kw_only=True)
class Op:
    """One op of the dialect.

    inputs      makes example arguments from a seeded generator: what tests and benchmarks draw from
    tolerance   relative L2 bound of another implementation against the reference in fp64; 0: bit-equal
    """

    name: str
    schema: str
    reference: Callable[..., Any]
    fake: Callable[..., Any]
    inputs: Inputs
    tolerance: float = 0.0
    overload: Any = field(compare=False)


OPS: dict[str, Op] = {}


def op(
    schema: str, *, fake: Callable[..., Any], inputs: Inputs, tolerance: float = 0.0
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function as the reference of `precede::<schema>` on every device without a kernel."""

    def register(reference: Callable[..., Any]) -> Callable[..., Any]:
        name = schema.partition("(")[0]
        _LIBRARY.define(schema)
        _LIBRARY.impl(name, reference, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_LIBRARY)
        overload = getattr(torch.ops.precede, name).default
        OPS[name] = Op(
            name=name,
            schema=schema,
            reference=reference,
            fake=fake,
            inputs=inputs,
            tolerance=tolerance,
            overload=overload,
        )
        return reference

    return register


def training(*tensors: torch.Tensor) -> bool:
    """Whether a leaf op must run its differentiable reference instead of the opaque op."""
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
