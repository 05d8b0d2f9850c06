"""Fuse the router into one op.

Finds    `route(x, weight, bias, bias_vl, image)` of model/ops/gate.py, any top-k and scale
Puts     `precede.mega_gate(x, weight, bias, bias_vl, image, topk, scale)`
Keeps    bits: the op's reference is the pattern itself; weights and ids keep their names
Refuses  a router whose scores are used elsewhere or scored by another function; the reason is in the record

    - %Li.ffn.gate.linear:f32[T,384] = linear(%Li.ffn_norm.to, %layers.i.ffn.gate.weight)
    - %Li.ffn.gate.softplus:f32[T,384] = softplus(%Li.ffn.gate.linear)
    - ... selection keys, top-k, gather, normalise
    - %Li.ffn.gate.mul:f32[T,6] = mul(%Li.ffn.gate.div, 1.5)
    + %Li.ffn.gate.mul:f32[T,6], %Li.ffn.gate.rsub:i64[T,6] = precede.mega_gate(%Li.ffn_norm.to, ..., 6, 1.5)
"""

from __future__ import annotations

import functools

import torch

from precede.model.ops.gate import route

from .graph import Graph
from .manager import PassContext, Tier
from .pattern import Pattern, TensorSpec
from .rewrite import Rewriter


class MegaGate:
    """See the module's text."""

    name = "mega_gate"
    numerics: Tier = "exact"

    def expects(self, graph: Graph, context: PassContext) -> int | None:
        """One router a layer; none where a test-only switch sums in double, which the op does not do."""
        return 0 if context.numerics.gemm_accumulate == "float64" else context.config.num_hidden_layers

    def run(self, graph: Graph, context: PassContext) -> None:
        """Replace every router."""
        if context.numerics.gemm_accumulate == "float64":
            return
        found = router(context).find(graph)
        rewriter = Rewriter(graph)
        for match in found.matches:
            holes = ("x", "weight", "bias", "bias_vl", "image", "topk", "scale")
            rewriter.replace(match, torch.ops.precede.mega_gate.default, [match[h] for h in holes])
            context.hit(match)
        for miss in found.misses:
            context.miss(miss)
        rewriter.finish()


def router(context: PassContext) -> Pattern:
    """The pattern of a router of this model's sizes and dtypes."""
    return _router(context.config.hidden_size, context.config.n_routed_experts, context.numerics.dtype)


@functools.cache
def _router(dim: int, experts: int, dtype: torch.dtype) -> Pattern:
    return Pattern(
        route,
        tensors={
            "x": TensorSpec(shape=(0, dim), dtype=dtype),
            "weight": TensorSpec(shape=(experts, dim), dtype=dtype),
            "bias": TensorSpec(shape=(experts,)),
            "bias_vl": TensorSpec(shape=(experts,)),
            "image": TensorSpec(shape=(0,), dtype=torch.bool),
        },
        scalars={"topk": (1, 2), "scale": (1.25, 2.75)},
        dynamic={"x": {0: "T"}, "image": {0: "T"}},
    )
