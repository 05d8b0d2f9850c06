"""A step as tensors: the worked example of a mixed batch, padding, kept rows, refusals."""

from __future__ import annotations

import pytest
import torch

from precede.model.batch import DIMS, StepBatch, StepRequest
from precede.model.cache import CacheLayout
from precede.model.config import ModelConfig
from precede.model.errors import BatchError

PUBLISHED = CacheLayout.of(ModelConfig.preset("published"), "native")
NANO = CacheLayout.of(ModelConfig.preset("nano"), "exact32", page_size=16)


def worked() -> StepBatch:
    """A: decode at 999. B: prompt 300, hit 256, restart at 128. C: prompt 1000, chunk of the first 700."""
    requests = [
        StepRequest(token_ids=range(1000), start=999, pages=range(1, 9), ring=1),
        StepRequest(
            token_ids=range(300), start=128, pages=[20, 21, 22], ring=2, write_from=256, window_floor=128, keep=128
        ),
        StepRequest(token_ids=range(700), start=0, pages=range(30, 36), ring=3, keep=128, logits="none"),
    ]
    return StepBatch.of(requests, PUBLISHED)


def test_worked_step() -> None:
    b = worked()
    assert b.row_start.tolist() == [0, 1, 173]
    assert b.token_ids.shape == (873,)
    assert b.positions[[0, 1, 172, 173, 872]].tolist() == [999, 128, 299, 0, 699]
    assert (b.token_slot == -1).nonzero().flatten().tolist() == list(range(1, 129))
    assert b.token_slot[[0, 129, 173]].tolist() == [8 * 128 + 999 % 128, 22 * 128, 30 * 128]
    assert b.window_floor.tolist() == [0, 128, 0]
    assert b.kept_rows.tolist() == [0, *range(45, 173), *range(745, 873)]
    assert b.late_row_start.tolist() == [0, 1, 129]
    assert b.late_chunk_start.tolist() == [999, 172, 572]
    assert b.late_window_floor.tolist() == [0, 172, 572]
    assert b.length.tolist() == [1000, 300, 700]
    assert b.logit_rows.tolist() == [0, 128]
    assert b.lookback_ids.tolist() == [[998, 997, 996], [127, 126, 125], [-1, -1, -1]]
    with pytest.raises(BatchError, match="keeps only some"):
        b.require_untrimmed()


def test_padding_writes_nothing_and_belongs_to_request_0() -> None:
    b = StepBatch.of([StepRequest(token_ids=[7, 8], pages=[3], ring=1)], NANO, rows=5, slots=3, pages=2, kept=4)
    assert b.row_valid.tolist() == [True, True, False, False, False]
    assert b.token_slot.tolist() == [48, 49, -1, -1, -1]
    assert b.kept_rows.tolist() == [0, 1, -1, -1]
    assert b.page_table.tolist() == [[3, 0], [0, 0], [0, 0]]
    assert b.ring.tolist() == [1, 0, 0]


def test_a_later_short_chunk_is_whole_and_reads_the_ring() -> None:
    r = StepRequest(token_ids=range(400), start=300, pages=range(1, 5), ring=1, keep=128)
    b = StepBatch.of([r], PUBLISHED)
    b.require_untrimmed()
    assert b.late_window_floor.tolist() == [0]


def test_example_names_every_size_differently() -> None:
    b = StepBatch.example(NANO)
    sizes: dict[str, set[int]] = {}
    for name, dims in DIMS.items():
        for size, dim in zip(getattr(b, name).shape, dims, strict=True):
            if isinstance(dim, str):
                sizes.setdefault(dim, set()).add(size)
    assert all(len(s) == 1 for s in sizes.values())
    values = [next(iter(s)) for s in sizes.values()]
    assert len(set(values)) == len(values)
    assert min(values) > 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"token_ids": []}, "no row"),
        ({"start": 4}, "no row"),
        ({"token_ids": [1, 512]}, "token id 512"),
        ({"token_ids": [1, -1]}, "token id -1"),
        ({"token_ids": [1] * 1025, "pages": list(range(1, 66))}, "max_position_embeddings = 1024"),
        ({"token_ids": [1] * 17}, "need 2 pages"),
        ({"pages": [0]}, "null page"),
        ({"ring": 0}, "null ring"),
        ({"window_floor": 1}, "window_floor"),
        ({"keep": 0}, "keep"),
        ({"logits": "first"}, "logits"),
        ({"late_floor": 1}, "late_floor"),
        ({"keep": 1, "late_floor": 0}, "late_floor"),
    ],
)
def test_refusals(fields: dict[str, object], message: str) -> None:
    with pytest.raises(BatchError, match=message):
        StepBatch.of([StepRequest(**{"token_ids": [1, 2, 3], "pages": [1], "ring": 1, **fields})], NANO)  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "value"), [("rows", 2), ("slots", 0), ("pages", 0), ("kept", 1)])
def test_a_padded_size_that_is_too_small(name: str, value: int) -> None:
    with pytest.raises(BatchError, match=f"{name} = {value} is too small"):
        StepBatch.of([StepRequest(token_ids=[1, 2, 3], pages=[1])], NANO, **{name: value})


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ({"pages": [2], "ring": 1}, "ring 1 is given to two requests"),
        ({"pages": [1], "ring": 2}, "write the same slot"),
    ],
)
def test_what_two_requests_may_not_share(second: dict[str, object], message: str) -> None:
    first = StepRequest(token_ids=[1, 2, 3], pages=[1], ring=1)
    with pytest.raises(BatchError, match=message):
        StepBatch.of([first, StepRequest(token_ids=[4, 5], **second)], NANO)  # type: ignore[arg-type]


def test_a_cached_page_may_be_shared() -> None:
    requests = [
        StepRequest(token_ids=[1] * 18, start=17, pages=[1, 2], ring=1),
        StepRequest(token_ids=[1] * 18, start=17, pages=[1, 3], ring=2),
    ]
    assert StepBatch.of(requests, NANO).token_slot.tolist() == [33, 49]


def test_an_empty_step_is_refused() -> None:
    with pytest.raises(BatchError, match="at least one request"):
        StepBatch.of([], NANO)


def test_all_integer_fields_are_int64() -> None:
    b = worked()
    assert {n for n in DIMS if getattr(b, n).dtype != torch.int64} == {"row_valid"}
