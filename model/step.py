"""What all layers of a step share: row facts and index tensors, derived once from the batch.

A window read has two sources: positions from the request's chunk start on come from this step's own records (row
`row_start + p - chunk_start`), older ones from the ring (row `ring * capacity + p mod capacity`). The ring is written
after attention, so a chunk may be longer than the ring and decode is the same code.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.utils import _pytree as pytree

from .batch import StepBatch
from .cache import CacheLayout
from .ops.rows import trim_rows
from .rope import Rotation, rotation


@dataclass
class Rows:
    """Facts of the rows that a layer runs on; T is their number, which after the cut is the number of kept rows."""

    positions: torch.Tensor  # [T]
    request: torch.Tensor  # [T]
    valid: torch.Tensor  # [T] bool
    image: torch.Tensor  # [T] bool: an image token
    token_slot: torch.Tensor  # [T] -1: write no global entry
    ring_slot: torch.Tensor  # [T] window-ring row to write; -1: none
    group_slot: torch.Tensor  # [T] open-group row to write; -1: none
    group_before: torch.Tensor  # [T] open-group row of the position before
    in_chunk_before: torch.Tensor  # [T] bool: the position before is a row of this step
    window_row: torch.Tensor  # [T, W] this step's record of each window position
    window_ring: torch.Tensor  # [T, W] ring row of each window position
    window_in_chunk: torch.Tensor  # [T, W] bool: which of the two holds it
    window_valid: torch.Tensor  # [T, W] bool: the position exists and is not below the floor
    page_table: torch.Tensor  # [R, P]
    plain: Rotation  # [T, dr/2] each: layers without compression
    yarn: Rotation  # layers with compression
    entry: dict[int, Rotation]  # by ratio: the first position of the row's group

    def rotation(self, ratio: int) -> Rotation:
        """Cosines and sines of the rows' own positions for a layer of this ratio."""
        return self.yarn if ratio else self.plain

    def entry_slot(self, ratio: int) -> torch.Tensor:
        """Slot of the compressed entry that the row completes; -1 if it completes none or must not write it."""
        closes = (self.token_slot >= 0) & ((self.positions + 1) % ratio == 0)
        return torch.where(closes, torch.div(self.token_slot, ratio, rounding_mode="floor"), -1)

    def visible(self, ratio: int) -> torch.Tensor:
        """Number of compressed entries whose last token is not after the row's; 0 for padding."""
        entries = torch.div(self.positions + 1, ratio, rounding_mode="floor")
        return torch.where(self.valid, entries, 0)


pytree.register_dataclass(Rows)


@dataclass
class WindowSource:
    """Where window records of this step's own rows lie: [R] each."""

    row_start: torch.Tensor
    chunk_start: torch.Tensor
    floor: torch.Tensor


def early_windows(batch: StepBatch) -> WindowSource:
    """Windows of the layers up to the cut: the step's own rows are all of its rows."""
    return WindowSource(batch.row_start, batch.chunk_start, batch.window_floor)


def late_windows(batch: StepBatch) -> WindowSource:
    """Windows of the layers after the cut: the step's own rows are the kept ones."""
    return WindowSource(batch.late_row_start, batch.late_chunk_start, batch.late_window_floor)


def derive_rows(
    batch: StepBatch,
    layout: CacheLayout,
    source: WindowSource,
    rotations: tuple[torch.Tensor, torch.Tensor],
    kept: torch.Tensor | None = None,
) -> Rows:
    """Row facts of all rows, or of the `kept` ones [K]; `rotations` are the two frequency tables (plain, YaRN)."""

    def take(x: torch.Tensor) -> torch.Tensor:
        return x if kept is None else trim_rows(x, kept)

    c = layout.config
    positions, request, valid = take(batch.positions), take(batch.request_of_row), take(batch.row_valid)
    token_slot = batch.token_slot if kept is None else torch.where(kept >= 0, trim_rows(batch.token_slot, kept), -1)
    ring, length = batch.ring[request], batch.length[request]
    row_start, chunk_start, floor = source.row_start[request], source.chunk_start[request], source.floor[request]
    capacity, group = layout.window_capacity, layout.group_capacity

    reach = torch.arange(1 - c.sliding_window, 1, device=positions.device)
    window = positions.unsqueeze(1) + reach
    in_chunk = window >= chunk_start.unsqueeze(1)
    window_valid = valid.unsqueeze(1) & (window >= floor.unsqueeze(1)) & (window >= 0)
    window_row = (row_start - chunk_start).unsqueeze(1) + window
    ratios = sorted({r for r in c.compress_ratios if r})
    plain, yarn = rotations
    return Rows(
        positions=positions,
        request=request,
        valid=valid,
        image=take(batch.token_ids) == c.image_token_id,
        token_slot=token_slot,
        ring_slot=torch.where(valid & (positions >= length - capacity), ring * capacity + positions % capacity, -1),
        group_slot=torch.where(valid & (positions >= length - group), ring * group + positions % group, -1),
        group_before=ring * group + (positions - 1).clamp(min=0) % group,
        in_chunk_before=positions - 1 >= chunk_start,
        window_row=torch.where(in_chunk & window_valid, window_row, 0),
        window_ring=ring.unsqueeze(1) * capacity + window.clamp(min=0) % capacity,
        window_in_chunk=in_chunk,
        window_valid=window_valid,
        page_table=batch.page_table,
        plain=rotation(positions, plain),
        yarn=rotation(positions, yarn),
        entry={r: rotation(positions - positions % r, yarn) for r in ratios},
    )
