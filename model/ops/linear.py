"""Products: one matrix, one matrix a group of heads, one matrix an expert; all accumulate in fp32 and round once.

`wide` sums in float64 instead: a test-only switch that makes a row's result independent of the other rows in the step.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .registry import op, training


def product(x: torch.Tensor, weight: torch.Tensor, wide: bool) -> torch.Tensor:
    """fp32 `x @ weight.T` of any float inputs; x [..., in], weight [out, in]."""
    if wide:
        return F.linear(x.double(), weight.double()).float()
    return F.linear(x.float(), weight.float())


def _linear_inputs(g: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(5, 64, generator=g), torch.randn(48, 64, generator=g)


@op(
    "linear(Tensor x, Tensor weight, ScalarType? out_dtype=None, bool wide=False) -> Tensor",
    fake=lambda x, weight, out_dtype=None, wide=False: x.new_empty(
        (*x.shape[:-1], weight.shape[0]), dtype=out_dtype or x.dtype
    ),
    inputs=_linear_inputs,
    tolerance=4e-3,
)
def linear_reference(
    x: torch.Tensor, weight: torch.Tensor, out_dtype: torch.dtype | None = None, wide: bool = False
) -> torch.Tensor:
    """round(x @ weight.T); on a GPU a bf16 product runs as one, where fp32 accumulation is the hardware's."""
    out_dtype = out_dtype or x.dtype
    if x.is_cuda and not wide and x.dtype == weight.dtype == torch.bfloat16:
        if out_dtype == torch.float32:
            rows = torch.mm(x.flatten(0, -2), weight.T, out_dtype=torch.float32)
            return rows.unflatten(0, x.shape[:-1])
        return F.linear(x, weight).to(out_dtype)
    return product(x, weight, wide).to(out_dtype)


def linear(
    x: torch.Tensor, weight: torch.Tensor, out_dtype: torch.dtype | None = None, wide: bool = False
) -> torch.Tensor:
    """x [..., in], weight [out, in] to [..., out] in `out_dtype` (default: x's)."""
    if training(x, weight):
        return linear_reference(x, weight, out_dtype, wide)
    return torch.ops.precede.linear(x, weight, out_dtype, wide)


def group_product(x: torch.Tensor, weight: torch.Tensor, wide: bool) -> torch.Tensor:
    """x [T, G, in], weight [G, out, in] to [T, G, out] in x's dtype: each group has its own matrix."""
    a, b = x.transpose(0, 1), weight.transpose(1, 2)
    if wide:
        y = torch.bmm(a.double(), b.double())
    elif x.is_cuda and x.dtype == weight.dtype == torch.bfloat16:
        y = torch.bmm(a, b)
    else:
        y = torch.bmm(a.float(), b.float())
    return y.transpose(0, 1).to(x.dtype)


def _grouped_inputs(g: torch.Generator) -> tuple[torch.Tensor, ...]:
    return torch.randn(7, 32, generator=g), torch.randn(4, 16, 32, generator=g), torch.tensor([0, 3, 3, 5, 6])


@op(
    "grouped_linear(Tensor x, Tensor weight, Tensor offsets, bool wide=False) -> Tensor",
    fake=lambda x, weight, offsets, wide=False: x.new_empty((x.shape[0], weight.shape[1])),
    inputs=_grouped_inputs,
    tolerance=4e-3,
)
def grouped_linear_reference(
    x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor, wide: bool = False
) -> torch.Tensor:
    """Rows offsets[e]:offsets[e+1] times expert e's matrix; rows from offsets[-1] on belong to no expert and give 0."""
    bounds = offsets.tolist()
    parts = [
        linear_reference(x[a:b], weight[e], None, wide)
        for e, (a, b) in enumerate(zip(bounds, bounds[1:], strict=False))
        if b > a
    ]
    parts.append(x.new_zeros(x.shape[0] - bounds[-1], weight.shape[1]))
    return torch.cat(parts)


def grouped_linear(x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor, wide: bool = False) -> torch.Tensor:
    """x [S, in] sorted by expert, weight [E, out, in], offsets int64 [E + 1] to [S, out] in x's dtype."""
    if training(x, weight):
        return grouped_linear_reference(x, weight, offsets, wide)
    return torch.ops.precede.grouped_linear(x, weight, offsets, wide)
