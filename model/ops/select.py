"""Selection with a total order: higher score first, then the smaller index; NaN and -inf are never taken.

Scores become 64-bit keys, an order-preserving int32 of the score above the reversed index, so that any top-k gives the
same answer. `+ 0.0` turns -0 into +0, which must tie.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

NEG_INF = float("-inf")
# The order-preserving int32 of -inf; NaN is one of the few keys below it.
_KEY_OF_NEG_INF = -2139095041
_NO_INDEX = 2**62


def selection_keys(scores: torch.Tensor) -> torch.Tensor:
    """int64 keys [T, n] of fp32 scores [T, n]: larger key = taken earlier; all keys of a row differ."""
    bits = (scores + 0.0).view(torch.int32)
    ordered = torch.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)
    ordered = torch.where(torch.isnan(scores), -(2**31), ordered).to(torch.int64)
    index = torch.arange(scores.shape[1], device=scores.device)
    return (ordered << 32) | (0xFFFFFFFF - index)


def best_indices(scores: torch.Tensor, k: int) -> torch.Tensor:
    """The k best columns by rank: fp32 [T, n >= k] to int64 [T, k], always k different ones, NaN and -inf last."""
    return 0xFFFFFFFF - (torch.topk(selection_keys(scores), k, dim=1).values & 0xFFFFFFFF)


def top_rows(scores: torch.Tensor, k: int) -> torch.Tensor:
    """The k best columns of every row, ascending: scores fp32 [T, n] to int64 [T, k].

    -1, at the end, where fewer than k exceed -inf; n may be smaller than k.
    """
    keys = torch.topk(selection_keys(F.pad(scores, (0, k), value=NEG_INF)), k, dim=1).values
    index = torch.where((keys >> 32) > _KEY_OF_NEG_INF, 0xFFFFFFFF - (keys & 0xFFFFFFFF), _NO_INDEX)
    ranked = torch.sort(index, dim=1).values
    return torch.where(ranked == _NO_INDEX, -1, ranked)


def select_blocks(scores: torch.Tensor, visible: torch.Tensor, block: int, k: int) -> torch.Tensor:
    """The k blocks with the best entry: scores fp32 [T, n], visible int64 [T] to ascending block ids [T, k], -1 last.

    The block that holds the newest visible entry is always kept; a NaN entry counts as none.
    """
    scores = torch.where(torch.isnan(scores), NEG_INF, scores)
    number = torch.arange((scores.shape[1] + block - 1) // block, device=scores.device)
    # Gathered by index: a view of blocks would ask whether a symbolic width is a multiple of the block.
    columns = (number * block).unsqueeze(1) + torch.arange(block, device=scores.device)
    best = F.pad(scores, (0, block - 1), value=NEG_INF)[:, columns].amax(-1)
    newest = torch.div(visible - 1, block, rounding_mode="floor")
    pinned = number == newest.unsqueeze(1)
    return top_rows(torch.where(pinned, float("inf"), best), k)


def keep_blocks(scores: torch.Tensor, blocks: torch.Tensor, block: int) -> torch.Tensor:
    """Scores [T, n] with -inf outside the given blocks [T, k] (-1: none)."""
    count = (scores.shape[1] + block - 1) // block
    kept = torch.zeros(scores.shape[0], count + 1, dtype=torch.bool, device=scores.device)
    kept = kept.scatter(1, torch.where(blocks < 0, count, blocks), True)
    entry = torch.div(torch.arange(scores.shape[1], device=scores.device), block, rounding_mode="floor")
    return torch.where(kept.index_select(1, entry), scores, NEG_INF)
