"""Row bookkeeping: keeping a subset of a step's rows."""

from __future__ import annotations

import torch

from .registry import op, training


def _inputs(g: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(6, 4, generator=g), torch.tensor([1, 4, -1])


@op(
    "trim_rows(Tensor x, Tensor rows) -> Tensor",
    fake=lambda x, rows: x.new_empty((rows.shape[0], *x.shape[1:])),
    inputs=_inputs,
)
def trim_rows_reference(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """x [T, ...], rows int64 [K] to [K, ...]; row -1 (padding) gives zeros."""
    taken = x.index_select(0, rows.clamp(min=0))
    keep = (rows >= 0).view(-1, *[1] * (x.dim() - 1))
    return torch.where(keep, taken, torch.zeros((), dtype=x.dtype, device=x.device))


def trim_rows(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """See the reference; differentiable while training."""
    if training(x):
        return trim_rows_reference(x, rows)
    return torch.ops.precede.trim_rows(x, rows)
