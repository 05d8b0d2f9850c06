"""Sums over the ranks of a role ("tp"): the op names the role, the process binds roles to groups."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ..errors import PrecedeError
from .registry import op

_GROUPS: dict[str, dist.ProcessGroup] = {}


def bind_group(role: str, group: dist.ProcessGroup) -> None:
    """Let `all_reduce(x, role)` run over `group` in this process."""
    _GROUPS[role] = group


@op(
    "all_reduce(Tensor x, str role) -> Tensor",
    fake=lambda x, role: torch.empty_like(x),
    inputs=lambda g: (torch.randn(4, 8, generator=g), "tp"),
)
def all_reduce_reference(x: torch.Tensor, role: str) -> torch.Tensor:
    """Sum of x over the role's ranks, a new tensor. Raises PrecedeError if the role has no group here."""
    if role not in _GROUPS:
        raise PrecedeError(f"all_reduce over role {role!r}, but no process group is bound to it; call bind_group first")
    y = x.clone()
    dist.all_reduce(y, group=_GROUPS[role])
    return y


def all_reduce(x: torch.Tensor, role: str, world: int) -> torch.Tensor:
    """x itself in a world of one rank, else its sum over the ranks."""
    return x if world == 1 else torch.ops.precede.all_reduce(x, role)
