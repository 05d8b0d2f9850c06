"""Stores: in-place writes by slot, and reading records back as values."""

from __future__ import annotations

import torch

from ..cache import RecordFormat
from ..errors import PrecedeError
from . import quant as quant_ops
from .registry import op, training


def _write_inputs(g: torch.Generator) -> tuple[object, ...]:
    return torch.zeros(3, 4, 8), torch.randn(5, 8, generator=g), torch.tensor([4, -1, 9, 5, -1])


def _fake_write(pool: torch.Tensor, records: torch.Tensor, slots: torch.Tensor, values: int = 0) -> None:
    return None


@op(
    "cache_write(Tensor(a!) pool, Tensor records, Tensor slots, int values=0) -> ()",
    fake=_fake_write,
    inputs=_write_inputs,
)
def cache_write_reference(pool: torch.Tensor, records: torch.Tensor, slots: torch.Tensor, values: int = 0) -> None:
    """pool [N, rows, w], records [T, w], slots int64 [T] = n * rows + row; -1 writes nothing.

    `values` > 0: a page keeps the first `values` elements of all its records, then the rest of all of them.
    """
    valid = slots >= 0
    slots, records = slots[valid], records[valid]
    count, rows, width = pool.shape
    if not values:
        pool.view(count * rows, width).index_copy_(0, slots, records)
        return
    page, row = slots // rows, slots % rows
    flat, split = pool.view(count, rows * width), rows * values
    flat[:, :split].view(count, rows, values)[page, row] = records[:, :values]
    flat[:, split:].view(count, rows, width - values)[page, row] = records[:, values:]


def write(pool: torch.Tensor, records: torch.Tensor, slots: torch.Tensor, values: int = 0) -> torch.Tensor:
    """Write and return the pool: in place, or while training a new one through which gradients flow."""
    if training(records):
        pool = pool.clone()
        cache_write_reference(pool, records, slots, values)
    else:
        torch.ops.precede.cache_write(pool, records, slots, values)
    return pool


def key_values(form: RecordFormat, dim: int) -> int:
    """The `values` argument of index-key pools: packed pages hold all values first, then all scales."""
    return dim // 2 if form.packed else 0


def encode(x: torch.Tensor, form: RecordFormat) -> torch.Tensor:
    """Vectors [..., d] to stored records: packed bytes, or values as they will be read back."""
    if form.packed:
        if training(x):
            raise PrecedeError("packed stores pass no gradient; train with a CacheLayout of store='values'")
        return quant_ops.pack(x, form.quantiser)
    return quant_ops.quantize(x, form.quantiser)


def decode(records: torch.Tensor, form: RecordFormat) -> torch.Tensor:
    """Stored records to vectors [..., d] in the format's dtype. A record of zero bytes is a vector of zeros."""
    if form.packed:
        return quant_ops.unpack(records, form.quantiser, form.dtype)
    return records


def page_records(pool: torch.Tensor, pages: torch.Tensor, values: int) -> torch.Tensor:
    """Records of whole pages in order: pool [N, rows, w], pages int64 [P] to [P * rows, w]."""
    taken = pool.index_select(0, pages)
    if values:
        rows, width = taken.shape[1:]
        flat, split = taken.flatten(1), rows * values
        head = flat[:, :split].view(-1, rows, values)
        taken = torch.cat((head, flat[:, split:].view(-1, rows, width - values)), dim=-1)
    return taken.flatten(0, 1)
