"""Logits of a step in, one token a request out.

Order: bias, ids that may not come yet, penalties, temperature, min_p, top_k, top_p, draw. The draw inverts the
cumulative distribution at one uniform number made from (seed, output index) by a counter-based generator, so a
request's tokens depend neither on who shares its step nor on when it was paused.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from .sampling import SamplingParams


@dataclass(frozen=True)
class Sample:
    """The choice for one row. `token` is None where no finite logit exists.

    logprob     log-softmax of the unmodified logits at the token, if asked for
    top         the likeliest ids with theirs, likeliest first, ties to the lower id
    """

    token: int | None
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass
class SamplingRow:
    """One request as the sampler sees it: its parameters, its seed, and what it has produced so far.

    `vocab_size` sizes the counts, which exist only where a penalty needs them.
    """

    params: SamplingParams
    seed: int
    prompt_ids: Sequence[int]
    vocab_size: int
    end_ids: Collection[int] = ()
    produced: int = 0
    _seen: torch.Tensor | None = field(default=None, repr=False)
    _counts: torch.Tensor | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.params.penalised:
            self._seen = torch.zeros(self.vocab_size, dtype=torch.bool)
            self._seen[torch.tensor(list(self.prompt_ids), dtype=torch.int64)] = True
            self._counts = torch.zeros(self.vocab_size)

    def push(self, token: int) -> None:
        """Count a produced token."""
        self.produced += 1
        if self._seen is not None and self._counts is not None:
            self._seen[token] = True
            self._counts[token] += 1

    def modify(self, logits: torch.Tensor) -> None:
        """Apply bias, suppressed ids and penalties to `logits` [vocab] fp32, in place."""
        p = self.params
        if p.logit_bias:
            ids = torch.tensor(list(p.logit_bias), device=logits.device)
            logits[ids] += torch.tensor(list(p.logit_bias.values()), dtype=logits.dtype, device=logits.device)
        if self.produced < p.min_tokens and self.end_ids:
            logits[torch.tensor(sorted(self.end_ids), device=logits.device)] = -torch.inf
        if self._seen is not None and self._counts is not None:
            counts = self._counts.to(logits.device)
            scaled = torch.where(logits > 0, logits / p.repetition_penalty, logits * p.repetition_penalty)
            logits.copy_(torch.where(self._seen.to(logits.device), scaled, logits))
            logits -= p.presence_penalty * (counts > 0) + p.frequency_penalty * counts


def sample(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[Sample]:
    """Choose a token for each row of `logits` [len(rows), vocab] fp32; the tensor is left as it is.

    A row that holds NaN, or nothing finite after its modifications, gives `Sample(None)` and disturbs no other row.
    """
    work = logits.float().clone()
    usable = ~torch.isnan(work).any(-1)
    for i, row in enumerate(rows):
        row.modify(work[i])
    usable &= torch.isfinite(work.amax(-1))
    tokens = work.argmax(-1)
    drawn = [i for i, ok in enumerate(usable.tolist()) if ok and not rows[i].params.greedy]
    if drawn:
        tokens[drawn] = _draw(work[drawn], [rows[i] for i in drawn])
    chosen = tokens.tolist()
    return [
        _sample_of(logits[i], chosen[i], row.params) if ok else Sample(None)
        for i, (row, ok) in enumerate(zip(rows, usable.tolist(), strict=True))
    ]


def uniform(seed: int, index: int) -> float:
    """The number in [0, 1) that belongs to output `index` of a request with `seed`."""
    bits = int(np.random.Philox(key=seed, counter=index).random_raw())
    return (bits >> 11) * 2.0**-53


def _draw(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """Draw from the filtered distributions: [n, vocab] -> ids [n]."""

    def column(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64, device=logits.device)[:, None]

    params = [row.params for row in rows]
    scaled = logits.double() / column([p.temperature for p in params])
    ordered, ids = torch.sort(scaled, dim=-1, descending=True, stable=True)
    mass = torch.softmax(ordered, -1)
    mass = torch.where(mass >= column([p.min_p for p in params]) * mass[:, :1], mass, 0)
    rank = torch.arange(mass.shape[1], device=logits.device)
    limit = column([float(p.top_k or mass.shape[1]) for p in params])
    mass = torch.where(rank < limit, mass, 0)
    before = mass.cumsum(-1) - mass
    kept = before < column([p.top_p for p in params]) * mass.sum(-1, keepdim=True)
    mass = torch.where(kept, mass, 0)
    cumulative = mass.cumsum(-1)
    point = column([uniform(row.seed, row.produced) for row in rows]) * cumulative[:, -1:]
    place = torch.searchsorted(cumulative, point, right=True)
    last = (mass > 0).sum(-1, keepdim=True) - 1
    return ids.gather(1, torch.minimum(place, last))[:, 0]


def _sample_of(logits: torch.Tensor, token: int, params: SamplingParams) -> Sample:
    if params.logprobs is None:
        return Sample(token)
    logprobs = torch.log_softmax(logits.float(), -1)
    top: tuple[tuple[int, float], ...] = ()
    if params.logprobs:
        values, ids = torch.sort(logprobs, descending=True, stable=True)
        count = params.logprobs
        top = tuple(zip(ids[:count].tolist(), values[:count].tolist(), strict=True))
    return Sample(token, float(logprobs[token]), top)
