"""Routed experts in plain ATen around `grouped_linear`: sort rows by expert, clamped SwiGLU, sum in router order."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def dispatch(ids: torch.Tensor, row_valid: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Order of the T*k (row, choice) pairs by expert, and where each expert's pairs begin.

    ids int64 [T, k], row_valid bool [T]; returns order int64 [T*k] and offsets int64 [E + 1]. The sort is stable. Rows
    that are not valid sort behind offsets[E] and reach no expert.
    """
    flat = torch.where(row_valid.unsqueeze(1), ids, num_experts).flatten()
    grouped, order = torch.sort(flat, stable=True)
    return order, torch.searchsorted(grouped, torch.arange(num_experts + 1, device=ids.device))


def clamped_swiglu(gate: torch.Tensor, up: torch.Tensor, limit: float) -> torch.Tensor:
    """fp32 silu(min(gate, limit)) * clamp(up, -limit, limit)."""
    return F.silu(gate.float().clamp(max=limit)) * up.float().clamp(-limit, limit)


def finalize(rows: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
    """round(sum_k rows[:, k] + shared), fp32, k ascending: rows [T, k, D], shared [T, D] to [T, D]."""
    total = rows[:, 0].float()
    for k in range(1, rows.shape[1]):
        total = total + rows[:, k].float()
    return (total + shared.float()).to(shared.dtype)
