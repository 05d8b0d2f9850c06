"""The n-gram memory: row numbers from token history, rows from memory-mapped tables, gated injection."""

from __future__ import annotations

import torch

from ..quant import decode_ue8m0
from .registry import op


def _hash_inputs(g: torch.Generator) -> tuple[object, ...]:
    ids = torch.randint(0, 16, (5,), generator=g)
    return (
        ids,
        torch.tensor([3, 4, 5, 0, 1]),
        torch.tensor([0, 0, 0, 1, 1]),
        torch.tensor([0, 3]),
        torch.tensor([3, 0]),
        torch.tensor([[4, 5, 6], [-1, -1, -1]]),
        torch.arange(16) % 8,
        torch.tensor([[101, 203, 307, 401]]),
        torch.tensor([[7, 11, 13]]),
        torch.tensor([[0, 7, 18]]),
        2,
        15,
    )


def _fake_hash(token_ids: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
    primes = rest[7]
    return token_ids.new_empty((token_ids.shape[0], *primes.shape))


@op(
    "engram_hash(Tensor token_ids, Tensor positions, Tensor request_of_row, Tensor row_start, Tensor chunk_start,"
    " Tensor lookback_ids, Tensor token_map, Tensor multipliers, Tensor primes, Tensor offsets, int pad, int image)"
    " -> Tensor",
    fake=_fake_hash,
    inputs=_hash_inputs,
)
def engram_hash(
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    request_of_row: torch.Tensor,
    row_start: torch.Tensor,
    chunk_start: torch.Tensor,
    lookback_ids: torch.Tensor,
    token_map: torch.Tensor,
    multipliers: torch.Tensor,
    primes: torch.Tensor,
    offsets: torch.Tensor,
    pad: int,
    image: int,
) -> torch.Tensor:
    """Table rows int64 [T, layers, columns] of every token.

    token_map int64 [vocab], multipliers [layers, n], primes and offsets [layers, (n-1) * heads]; columns go by n-gram
    size, then head. Earlier ids come from the chunk's own rows or, before it, from `lookback_ids` (newest first, -1:
    none). From the first missing or image token backwards the pad id stands in.
    """
    reach = multipliers.shape[1]
    heads = primes.shape[1] // (reach - 1)
    row = torch.arange(token_ids.shape[0], device=token_ids.device)
    first = row_start[request_of_row]
    alive = torch.ones_like(token_ids, dtype=torch.bool)
    pad_value = token_map[pad]
    rolling = torch.zeros(token_ids.shape[0], multipliers.shape[0], dtype=torch.int64, device=token_ids.device)
    sizes = []
    for back in range(reach):
        source = row - back
        before = (first - source - 1).clamp(0, max(lookback_ids.shape[1] - 1, 0))
        token = torch.where(source >= first, token_ids[source.clamp(min=0)], lookback_ids[request_of_row, before])
        alive = alive & (positions >= back) & (token >= 0) & (token != image)
        value = torch.where(alive, token_map[token.clamp(min=0)], pad_value)
        rolling = rolling ^ (value.unsqueeze(1) * multipliers[:, back])
        if back:
            sizes.append(rolling.unsqueeze(-1).expand(-1, -1, heads))
    return torch.cat(sizes, dim=-1) % primes + offsets


def _gather_inputs(g: torch.Generator) -> tuple[object, ...]:
    table = torch.randn(9, 64, generator=g).to(torch.float8_e4m3fn)
    scale = torch.randint(120, 130, (9, 2), generator=g).to(torch.uint8)
    return table, scale, torch.tensor([[0, 8, 3], [2, -1, 9]]), torch.float32


@op(
    "engram_gather(Tensor table, Tensor scale, Tensor rows, ScalarType dtype) -> Tensor",
    fake=lambda table, scale, rows, dtype: rows.new_empty((rows.shape[0], rows.shape[1] * table.shape[1]), dtype=dtype),
    inputs=_gather_inputs,
)
def engram_gather(table: torch.Tensor, scale: torch.Tensor, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """table float8_e4m3fn [N, d], scale UE8M0 [N, d/32], rows int64 [T, columns] to [T, columns * d], exact in bf16.

    Only the named rows are read; a row number outside the table gives zeros.
    """
    inside = (rows >= 0) & (rows < table.shape[0])
    # A table stays in host memory whatever the device; only what was read travels.
    at = torch.where(inside, rows, 0).flatten().to(table.device)
    codes = table.view(torch.uint8).index_select(0, at).to(rows.device)
    exponents = scale.index_select(0, at).to(rows.device)
    values = codes.view(torch.float8_e4m3fn).float().unflatten(-1, (-1, 32)) * decode_ue8m0(exponents).unsqueeze(-1)
    rows_out = values.view(*rows.shape, table.shape[1])
    return torch.where(inside.unsqueeze(-1), rows_out, 0.0).flatten(1).to(dtype)


def inject(
    streams: torch.Tensor,
    kv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    image: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """Add a gated shared value to every stream: streams [T, m, D], kv [T, (m+1) * D] (m keys, one value).

    gate_i = sigmoid(copysign(sqrt(max(|d|, 1e-6)), d)), d the normalised dot product of stream and key / sqrt(D);
    0 on image rows (bool [T]). fp32 inside, the streams' dtype out.
    """
    m, dim = streams.shape[1:]
    key, value = kv[:, : m * dim].unflatten(1, (m, dim)).float(), kv[:, m * dim :].float()
    x = streams.float()
    dot = (x * (q_weight.float() * k_weight.float()) * key).sum(-1)
    dot = dot * torch.rsqrt(x.square().mean(-1) + eps) * torch.rsqrt(key.square().mean(-1) + eps) * dim**-0.5
    gate = torch.sigmoid(torch.copysign(dot.abs().clamp(min=1e-6).sqrt(), dot))
    gate = torch.where(image.unsqueeze(1), 0.0, gate)
    return (x + gate.unsqueeze(-1) * value.unsqueeze(1)).to(streams.dtype)
