"""Index scores of every compressed entry that a row may see."""

from __future__ import annotations

import torch

from .. import quant
from .kv import page_records
from .registry import op, training


def _inputs(g: torch.Generator) -> tuple[object, ...]:
    q, w = torch.randn(6, 4, 32, generator=g), torch.randn(6, 4, generator=g)
    pool = torch.randn(5, 4, 32, generator=g)
    table = torch.tensor([[1, 2], [4, 0]])
    return q, w, pool, table, torch.tensor([0, 0, 0, 1, 1, 0]), torch.tensor([3, 4, 8, 1, 2, 0])


def _fake(
    q: torch.Tensor,
    w: torch.Tensor,
    key_pool: torch.Tensor,
    page_table: torch.Tensor,
    request_of_row: torch.Tensor,
    visible: torch.Tensor,
    wide: bool = False,
) -> torch.Tensor:
    return q.new_empty((q.shape[0], page_table.shape[1] * key_pool.shape[1]), dtype=torch.float32)


@op(
    "indexer_logits(Tensor q, Tensor w, Tensor key_pool, Tensor page_table, Tensor request_of_row, Tensor visible,"
    " bool wide=False) -> Tensor",
    fake=_fake,
    inputs=_inputs,
    tolerance=4e-3,
)
def indexer_logits_reference(
    q: torch.Tensor,
    w: torch.Tensor,
    key_pool: torch.Tensor,
    page_table: torch.Tensor,
    request_of_row: torch.Tensor,
    visible: torch.Tensor,
    wide: bool = False,
) -> torch.Tensor:
    """logits[t, j] = sum_h w[t, h] * relu(q[t, h] . key[j]) for j < visible[t], -inf elsewhere; fp32 [T, P * rows].

    q [T, H, d], w fp32 [T, H] (score scale included), key_pool [N, rows, d] values or packed mxfp4 records,
    page_table int64 [R, P], visible int64 [T]. One product per request; pages past the last visible entry are not read.
    """
    rows_per_page, dim = key_pool.shape[1], q.shape[-1]
    out = q.new_full((q.shape[0], page_table.shape[1] * rows_per_page), float("-inf"), dtype=torch.float32)
    packed = key_pool.dtype == torch.uint8
    acc = torch.float64 if wide else torch.float32
    for request in request_of_row.unique().tolist():
        rows = ((request_of_row == request) & (visible > 0)).nonzero().squeeze(1)
        if rows.numel() == 0:
            continue
        seen = visible[rows]
        count = int(seen.max())
        pages = page_table[request, : -(-count // rows_per_page)]
        keys = page_records(key_pool, pages, dim // 2 if packed else 0)[:count]
        keys = quant.unpack_mxfp4(keys, torch.float32) if packed else keys
        dots = torch.relu(q[rows].to(acc).flatten(0, 1) @ keys.to(acc).T).view(rows.shape[0], -1, count)
        scores = (dots * w[rows].to(acc).unsqueeze(-1)).sum(1).float()
        hidden = torch.arange(count, device=q.device) >= seen.unsqueeze(1)
        out[rows, :count] = scores.masked_fill(hidden, float("-inf"))
    return out


def indexer_logits(
    q: torch.Tensor,
    w: torch.Tensor,
    key_pool: torch.Tensor,
    page_table: torch.Tensor,
    request_of_row: torch.Tensor,
    visible: torch.Tensor,
    wide: bool = False,
) -> torch.Tensor:
    """See the reference; differentiable while training."""
    if training(q, w, key_pool):
        return indexer_logits_reference(q, w, key_pool, page_table, request_of_row, visible, wide)
    return torch.ops.precede.indexer_logits(q, w, key_pool, page_table, request_of_row, visible, wide)
