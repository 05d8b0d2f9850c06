"""Constants of the n-gram hash: prime bucket sizes and multipliers, both functions of the config alone.

Walking the Engram layers in order and the n-gram sizes 2, 3, ... within each, every size restarts above
`engram_vocab_size - 1` and takes the next primes that no layer and no size has taken before, one per head. Multipliers
of layer l are 2r + 1 with r drawn by numpy's default generator seeded with 10007 * l. Source: spec section 9.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True)
class NgramBuckets:
    """Primes and row offsets per Engram layer, in column order (size 2 heads, size 3 heads, ...)."""

    primes: tuple[tuple[int, ...], ...]
    offsets: tuple[tuple[int, ...], ...]

    def rows(self) -> tuple[int, ...]:
        """Rows of each layer's table: the sum of its primes."""
        return tuple(sum(p) for p in self.primes)


def _is_prime(n: int) -> bool:
    if n < 2 or n % 2 == 0:
        return n == 2
    return all(n % d for d in range(3, math.isqrt(n) + 1, 2))


def _primes_above(n: int) -> Iterator[int]:
    while True:
        n += 1
        if _is_prime(n):
            yield n


@cache
def ngram_buckets(num_layers: int, max_ngram: int, heads: int, vocab: int) -> NgramBuckets:
    """The buckets of `num_layers` Engram layers."""
    taken: set[int] = set()
    primes: list[tuple[int, ...]] = []
    for _ in range(num_layers):
        layer: list[int] = []
        for _ in range(2, max_ngram + 1):
            fresh = (p for p in _primes_above(vocab - 1) if p not in taken)
            chosen = [next(fresh) for _ in range(heads)]
            taken.update(chosen)
            layer += chosen
        primes.append(tuple(layer))
    offsets = tuple(tuple(sum(p[:i]) for i in range(len(p))) for p in primes)
    return NgramBuckets(tuple(primes), offsets)


def ngram_multipliers(layer: int, max_ngram: int, compressed_vocab: int) -> tuple[int, ...]:
    """Odd multipliers of one layer, one per reach 0 .. max_ngram - 1; id * multiplier stays below 2^63."""
    import numpy as np

    bound = (2**63 - 1) // compressed_vocab // 2
    drawn = np.random.default_rng(10007 * layer).integers(0, bound, size=max_ngram, dtype=np.int64)
    return tuple(int(r) * 2 + 1 for r in drawn)
