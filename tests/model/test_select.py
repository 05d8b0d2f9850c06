"""Selection: the total order, ties, NaN, infinities, few entries; blocks and pins."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from precede.model.ops.select import best_indices, keep_blocks, select_blocks, top_rows

INF, NAN = float("inf"), float("nan")
SCORES = st.lists(st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.5, 1e-40, -1e-40, INF, -INF, NAN]), min_size=1, max_size=12)


def oracle(row: list[float], k: int) -> list[int]:
    legal = [i for i, s in enumerate(row) if s == s and s != -INF]
    return sorted(sorted(legal, key=lambda i: (-row[i], i))[:k])


@settings(max_examples=200, deadline=None)
@given(rows=st.lists(SCORES, min_size=1, max_size=4), k=st.integers(1, 14))
def test_top_rows_is_the_sorted_set(rows: list[list[float]], k: int) -> None:
    n = max(map(len, rows))
    scores = torch.tensor([r + [-INF] * (n - len(r)) for r in rows])
    for got, row in zip(top_rows(scores, k).tolist(), rows, strict=True):
        want = oracle(row, k)
        assert got == want + [-1] * (k - len(want))


@settings(max_examples=100, deadline=None)
@given(row=SCORES, data=st.data())
def test_best_indices_are_different_and_ranked(row: list[float], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(row)))
    got = best_indices(torch.tensor([row]), k)[0].tolist()
    assert len(set(got)) == k
    rank = sorted(range(len(row)), key=lambda i: (row[i] != row[i], -row[i] if row[i] == row[i] else 0, i))
    assert got == rank[:k]


def test_negative_zero_ties_with_zero() -> None:
    assert top_rows(torch.tensor([[-0.0, 0.0, -0.0]]), 2).tolist() == [[0, 1]]


def test_thousands_of_equal_scores() -> None:
    assert top_rows(torch.zeros(2, 5000), 512)[1].tolist() == list(range(512))


def test_blocks_by_best_entry_with_the_newest_pinned() -> None:
    scores = torch.tensor([[5.0, 0, 0, 1, 0, 9, -3, -INF], [1.0, 0, 0, 0, 0, 0, 0, 0]])
    scores[1, 1:] = -INF
    got = select_blocks(scores, torch.tensor([7, 1]), 3, 2)
    assert got.tolist() == [[1, 2], [0, -1]]  # block 2 holds entry 6, the newest; block 0 (5.0) loses to block 1 (9.0)
    assert select_blocks(scores, torch.tensor([0, 0]), 3, 2)[1].tolist() == [0, -1]


def test_a_nan_entry_does_not_drop_its_block() -> None:
    scores = torch.tensor([[NAN, 9.0, 1.0, 1.0, 2.0, 2.0, 0.0, 0.0]])
    assert select_blocks(scores, torch.tensor([8]), 2, 2).tolist() == [[0, 3]]


def test_nothing_visible_selects_nothing() -> None:
    scores = torch.full((1, 6), -INF)
    assert select_blocks(scores, torch.tensor([0]), 4, 3).tolist() == [[-1, -1, -1]]
    assert top_rows(scores, 3).tolist() == [[-1, -1, -1]]


def test_keep_blocks_hides_the_rest() -> None:
    scores = torch.arange(7.0).unsqueeze(0)
    got = keep_blocks(scores, torch.tensor([[1, -1]]), 3)
    assert got.tolist() == [[-INF, -INF, -INF, 3.0, 4.0, 5.0, -INF]]
