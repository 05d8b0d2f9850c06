"""Mixture of experts: router, routed experts, one shared expert."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import nn

from .config import ModelConfig
from .layers import Linear, quantize_input
from .numerics import Numerics
from .ops.collectives import all_reduce
from .ops.experts import clamped_swiglu, dispatch, finalize
from .ops.gate import route
from .ops.linear import grouped_linear
from .step import Rows


class Router(nn.Module):
    """Chooses experts; image rows have a selection bias of their own."""

    def __init__(self, config: ModelConfig, numerics: Numerics) -> None:
        super().__init__()
        self.topk, self.scale = config.num_experts_per_tok, config.routed_scaling_factor
        self.wide = numerics.gemm_accumulate == "float64"
        self.weight = nn.Parameter(torch.empty(config.n_routed_experts, config.hidden_size, dtype=numerics.dtype))
        self.bias = nn.Parameter(torch.empty(config.n_routed_experts, dtype=torch.float32))
        self.bias_vl = nn.Parameter(torch.empty(config.n_routed_experts, dtype=torch.float32))

    def forward(self, h: torch.Tensor, image: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """h [T, D], image bool [T] to weights fp32 [T, k] and ids int64 [T, k]."""
        return route(h, self.weight, self.bias, self.bias_vl, image, self.topk, self.scale, self.wide)


class SharedExpert(nn.Module):
    """The expert that every row passes."""

    def __init__(self, config: ModelConfig, numerics: Numerics, weight_dtype: torch.dtype) -> None:
        super().__init__()
        self.limit, self.numerics = config.swiglu_limit, numerics
        self.w1 = Linear(config.hidden_size, config.moe_intermediate_size, numerics, weight_dtype)
        self.w3 = Linear(config.hidden_size, config.moe_intermediate_size, numerics, weight_dtype)
        self.w2 = Linear(config.moe_intermediate_size, config.hidden_size, numerics, weight_dtype)

    def forward(self, hq: torch.Tensor) -> torch.Tensor:
        """hq [T, D], already quantised, to [T, D]."""
        h = clamped_swiglu(self.w1(hq), self.w3(hq), self.limit).to(hq.dtype)
        return self.w2(quantize_input(h, self.numerics))


class Experts(nn.Module):
    """Stacked routed experts [E, out, in]; the routing weight multiplies before w2 and its rounding."""

    def __init__(self, config: ModelConfig, numerics: Numerics, weight_dtype: torch.dtype) -> None:
        super().__init__()
        self.limit, self.numerics = config.swiglu_limit, numerics
        self.wide = numerics.gemm_accumulate == "float64"
        count, dim, inner = config.n_routed_experts, config.hidden_size, config.moe_intermediate_size
        self.w1 = nn.Parameter(torch.empty(count, inner, dim, dtype=weight_dtype))
        self.w3 = nn.Parameter(torch.empty(count, inner, dim, dtype=weight_dtype))
        self.w2 = nn.Parameter(torch.empty(count, dim, inner, dtype=weight_dtype))

    def forward(
        self, hq: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, row_valid: torch.Tensor
    ) -> torch.Tensor:
        """hq [T, D], weights fp32 [T, k], ids int64 [T, k] to [T, k, D], a row's choices in router order."""
        topk = ids.shape[1]
        order, offsets = dispatch(ids, row_valid, self.w1.shape[0])
        x = hq[torch.div(order, topk, rounding_mode="floor")]
        gate = grouped_linear(x, self.w1, offsets, self.wide)
        up = grouped_linear(x, self.w3, offsets, self.wide)
        h = (weights.flatten()[order].unsqueeze(1) * clamped_swiglu(gate, up, self.limit)).to(hq.dtype)
        y = grouped_linear(quantize_input(h, self.numerics), self.w2, offsets, self.wide)
        return y[torch.argsort(order)].unflatten(0, (-1, topk))


class MoE(nn.Module):
    """round(sum of the chosen experts + the shared expert)."""

    def __init__(self, config: ModelConfig, numerics: Numerics, weight_dtype: torch.dtype, world: int = 1) -> None:
        super().__init__()
        self.config, self.numerics, self.world = config, numerics, world
        self.gate = Router(config, numerics)
        self.experts = Experts(config, numerics, weight_dtype)
        self.shared_experts = SharedExpert(config, numerics, weight_dtype)

    @property
    def template_kind(self) -> Hashable:
        """Everything forward reads besides weights and arguments."""
        c = self.config
        return (c.num_experts_per_tok, c.routed_scaling_factor, c.swiglu_limit, self.numerics, self.world)

    def forward(self, h: torch.Tensor, rows: Rows, taps: dict[str, torch.Tensor] | None = None) -> torch.Tensor:
        """h [T, D] to [T, D]; rows that are not valid reach no routed expert."""
        weights, ids = self.gate(h, rows.image)
        if taps is not None:
            taps["router_weights"], taps["router_ids"] = weights, ids
        hq = quantize_input(h, self.numerics)
        y = finalize(self.experts(hq, weights, ids, rows.valid), self.shared_experts(hq))
        return all_reduce(y, "tp", self.world)
