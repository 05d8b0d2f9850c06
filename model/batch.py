"""One step's rows and requests as tensors: everything a forward needs to know besides weights and caches.

Rows are flat: chunks of several requests one after another. T rows, K kept rows, R requests, P pages a request,
L logit rows. Layers after the cut read the `late_*` twins, whose coordinates are the kept rows'.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal

import torch
from torch.utils import _pytree as pytree

from .cache import CacheLayout
from .errors import BatchError


@dataclass(frozen=True, kw_only=True)
class StepRequest:
    """What one request contributes to a step.

    token_ids      the request's ids from position 0 up to the end of this step
    start          position of the first row; rows are start .. len(token_ids) - 1
    pages          page ids, page i holds positions [i * page_size, (i+1) * page_size); 0 is not allowed
    ring           ring slot, 1 or larger
    write_from     positions below keep the cached global entries (a prefix hit's length); their slot is -1
    window_floor   first position that a window may read (a replay start)
    keep           rows that the layers after the cut run on: the last `keep`; None: all
    late_floor     window floor after the cut; default: window_floor, or the first kept position if rows are trimmed.
                   Give it where an earlier chunk kept fewer rows than a window reaches back
    logits         rows whose logits are wanted: the last one, all kept ones, or none
    """

    token_ids: Sequence[int]
    start: int = 0
    pages: Sequence[int] = ()
    ring: int = 1
    write_from: int = 0
    window_floor: int = 0
    keep: int | None = None
    late_floor: int | None = None
    logits: Literal["last", "all", "none"] = "last"


@dataclass
class StepBatch:
    """The tensors of one step; int64 unless noted. Padding rows: id 0, position 0, request 0, slot -1, not valid."""

    token_ids: torch.Tensor  # [T]
    positions: torch.Tensor  # [T] absolute position
    request_of_row: torch.Tensor  # [T]
    row_valid: torch.Tensor  # [T] bool
    token_slot: torch.Tensor  # [T] page * page_size + p mod page_size; -1: write no global entry
    row_start: torch.Tensor  # [R] first row of the request
    chunk_start: torch.Tensor  # [R] position of that row
    window_floor: torch.Tensor  # [R] first position a window may read, layers <= cut
    late_row_start: torch.Tensor  # [R] the same three among the kept rows, layers > cut
    late_chunk_start: torch.Tensor  # [R]
    late_window_floor: torch.Tensor  # [R]
    length: torch.Tensor  # [R] positions computed after this step
    ring: torch.Tensor  # [R] ring slot; 0: none
    lookback_ids: torch.Tensor  # [R, max_ngram - 1] ids before the chunk, newest first; -1: none
    page_table: torch.Tensor  # [R, P] page ids; 0: none
    kept_rows: torch.Tensor  # [K] rows that pass the cut; -1: padding
    logit_rows: torch.Tensor  # [L] indices into the kept rows

    @classmethod
    def of(
        cls,
        requests: Sequence[StepRequest],
        layout: CacheLayout,
        *,
        rows: int | None = None,
        slots: int | None = None,
        pages: int | None = None,
        kept: int | None = None,
        device: torch.device | str = "cpu",
    ) -> StepBatch:
        """Lay `requests` out in order, then pad to `rows` rows, `slots` requests, `pages` pages, `kept` kept rows.

        Raises BatchError for ids outside the vocabulary, an empty chunk, missing pages or rings, or a padded size that
        is too small; nothing is clamped.
        """
        c, page_size = layout.config, layout.page_size
        if not requests:
            raise BatchError("a step needs at least one request")
        row: dict[str, list[int]] = {
            k: [] for k in ("token_ids", "positions", "request_of_row", "token_slot", "kept_rows", "logit_rows")
        }
        per: dict[str, list[int]] = {k: [] for k in _PER_REQUEST}
        tables: list[list[int]] = []
        lookbacks: list[list[int]] = []
        for number, r in enumerate(requests):
            _check(r, number, layout)
            end, count = len(r.token_ids), len(r.token_ids) - r.start
            first_row, first_kept = len(row["token_ids"]), len(row["kept_rows"])
            keep = count if r.keep is None else min(r.keep, count)
            positions = range(r.start, end)
            row["token_ids"] += [int(i) for i in r.token_ids[r.start :]]
            row["positions"] += positions
            row["request_of_row"] += [number] * count
            row["token_slot"] += [
                r.pages[p // page_size] * page_size + p % page_size if p >= r.write_from else -1 for p in positions
            ]
            row["kept_rows"] += range(first_row + count - keep, first_row + count)
            wanted = {"last": 1, "all": keep, "none": 0}[r.logits]
            row["logit_rows"] += range(first_kept + keep - wanted, first_kept + keep)
            late_floor = r.late_floor
            if late_floor is None:
                late_floor = r.window_floor if keep == count else max(r.window_floor, end - keep)
            values = (first_row, r.start, r.window_floor, first_kept, end - keep, late_floor, end, r.ring)
            for name, value in zip(_PER_REQUEST, values, strict=True):
                per[name].append(value)
            before = [int(i) for i in r.token_ids[max(0, r.start - c.lookback) : r.start]][::-1]
            lookbacks.append(before + [-1] * (c.lookback - len(before)))
            tables.append([int(p) for p in r.pages])

        _check_owners(requests, row["token_slot"])
        T, K, R = len(row["token_ids"]), len(row["kept_rows"]), len(requests)
        P = max(1, *(len(t) for t in tables))
        sizes = (("rows", rows, T), ("slots", slots, R), ("pages", pages, P), ("kept", kept, K))
        T_pad, R_pad, P_pad, K_pad = (n if padded is None else padded for _, padded, n in sizes)
        for name, padded, needed in sizes:
            if padded is not None and padded < needed:
                raise BatchError(f"{name} = {padded} is too small: this step needs {needed}")

        def tensor(values: list[int], size: int, fill: int) -> torch.Tensor:
            return torch.tensor(values + [fill] * (size - len(values)), dtype=torch.int64, device=device)

        def table(rows_: list[list[int]], width: int, fill: int) -> torch.Tensor:
            padded = [r + [fill] * (width - len(r)) for r in rows_] + [[fill] * width] * (R_pad - R)
            return torch.tensor(padded, dtype=torch.int64, device=device).view(R_pad, width)

        return cls(
            token_ids=tensor(row["token_ids"], T_pad, 0),
            positions=tensor(row["positions"], T_pad, 0),
            request_of_row=tensor(row["request_of_row"], T_pad, 0),
            row_valid=torch.arange(T_pad, device=device) < T,
            token_slot=tensor(row["token_slot"], T_pad, -1),
            lookback_ids=table(lookbacks, c.lookback, -1),
            page_table=table(tables, P_pad, 0),
            kept_rows=tensor(row["kept_rows"], K_pad, -1),
            logit_rows=tensor(row["logit_rows"], len(row["logit_rows"]), 0),
            **{name: tensor(per[name], R_pad, 0) for name in _PER_REQUEST},
        )

    @classmethod
    def example(cls, layout: CacheLayout, device: torch.device | str = "cpu") -> StepBatch:
        """A small legal step whose T, K, R, P and L are all different and above 1: what capture traces with."""
        page = layout.page_size
        requests = [
            StepRequest(token_ids=[3] * (2 * page + 1), start=2 * page, pages=[1, 2, 3], ring=1),
            StepRequest(token_ids=[3] * 5, pages=[4], ring=2),
        ]
        return cls.of(requests, layout, rows=11, slots=5, pages=4, kept=13, device=device)

    def require_untrimmed(self) -> None:
        """Raise BatchError if a request keeps fewer rows than it has (reads data; not for captured code)."""
        if not torch.equal(self.late_chunk_start, self.chunk_start):
            raise BatchError(
                "this step keeps only some of its rows, and what runs it runs every layer on every row; "
                "leave StepRequest.keep at None, or run Transformer.replay"
            )


_PER_REQUEST = (
    "row_start",
    "chunk_start",
    "window_floor",
    "late_row_start",
    "late_chunk_start",
    "late_window_floor",
    "length",
    "ring",
)

pytree.register_dataclass(StepBatch)

# Named sizes of each field's dimensions; a plain int is static.
DIMS: dict[str, tuple[str | int, ...]] = {
    f.name: (
        ("T",)
        if f.name in ("token_ids", "positions", "request_of_row", "row_valid", "token_slot")
        else ("K",)
        if f.name == "kept_rows"
        else ("L",)
        if f.name == "logit_rows"
        else ("R", "P")
        if f.name == "page_table"
        else ("R", -1)
        if f.name == "lookback_ids"
        else ("R",)
    )
    for f in fields(StepBatch)
}


def _check(r: StepRequest, number: int, layout: CacheLayout) -> None:
    c, end = layout.config, len(r.token_ids)
    where = f"request {number}"
    if not 0 <= r.start < end:
        raise BatchError(f"{where}: start = {r.start} leaves no row of its {end} tokens")
    if end > c.max_position_embeddings:
        raise BatchError(f"{where}: {end} tokens exceed max_position_embeddings = {c.max_position_embeddings}")
    used = r.token_ids[max(0, r.start - c.lookback) :]
    bad = next((int(i) for i in used if not 0 <= int(i) < c.vocab_size), None)
    if bad is not None:
        raise BatchError(f"{where}: token id {bad} is outside the vocabulary of {c.vocab_size}")
    needed = -(-end // layout.page_size)
    if len(r.pages) < needed:
        raise BatchError(f"{where}: {end} tokens need {needed} pages of {layout.page_size}, got {len(r.pages)}")
    if any(int(p) < 1 for p in r.pages):
        raise BatchError(f"{where}: page 0 is the null page and cannot be used, got pages {list(r.pages)}")
    if r.ring < 1:
        raise BatchError(f"{where}: ring 0 is the null ring and cannot be used")
    if not 0 <= r.window_floor <= r.start or (r.keep is not None and r.keep < 1):
        raise BatchError(f"{where}: window_floor = {r.window_floor} and keep = {r.keep} do not fit start = {r.start}")
    if r.logits not in ("last", "all", "none"):
        raise BatchError(f"{where}: logits = {r.logits!r}; choose last, all or none")
    first_kept = r.start if r.keep is None else max(r.start, end - r.keep)
    lowest = r.window_floor if first_kept == r.start else first_kept
    if r.late_floor is not None and not lowest <= r.late_floor <= first_kept:
        raise BatchError(
            f"{where}: late_floor = {r.late_floor} is outside {lowest}..{first_kept}: the layers after the cut have "
            f"nothing below {lowest}, and row {first_kept} must see itself"
        )


def _check_owners(requests: Sequence[StepRequest], slots: Sequence[int]) -> None:
    rings = [r.ring for r in requests]
    twice = next((ring for ring in rings if rings.count(ring) > 1), None)
    if twice is not None:
        raise BatchError(f"ring {twice} is given to two requests of one step; a ring belongs to one request")
    written = [s for s in slots if s >= 0]
    if len(set(written)) != len(written):
        raise BatchError("two rows of one step write the same slot; a page that is written belongs to one request")
