"""Bounded replay in the eager model: exact where it must be, close elsewhere, exact everywhere at the exact lengths."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest
import torch

from precede.model.cache import CacheLayout
from precede.model.transformer import Transformer

from ..golden_cases import Sequences

Models = Callable[..., Transformer]


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def sequence(model: Transformer, length: int, *, replay: bool = True, seed: int = 3) -> Sequences:
    rng = random.Random(seed)
    ids = [[rng.randrange(3, 500) for _ in range(length)]]
    layout = CacheLayout.of(model.config, model.numerics, page_size=16)
    model.set_layout(layout)
    return Sequences(model.replay if replay else model, layout, ids)


def exact_lengths(model: Transformer) -> tuple[int, int]:
    """Replay lengths from which both sides are exact: R after a hit, P kept rows (spec of the runtime, 5.6)."""
    c = model.config
    reach = c.sliding_window - 1
    late = c.num_hidden_layers - 1 - c.cut
    return reach * c.num_hidden_layers, c.sliding_window + (late - 1) * reach


def test_exact_lengths_of_the_ladder(model_of: Models) -> None:
    assert exact_lengths(model_of("nano")) == (70, 29)
    assert exact_lengths(model_of("mini")) == (372, 156)


def test_a_prompt_within_the_window_is_exact(model_of: Models) -> None:
    model = model_of("nano")
    w = model.config.sliding_window
    a = sequence(model, w).step(0, w, keep=w)
    b = sequence(model, w, replay=False).step(0, w)
    assert torch.equal(a, b)


def test_untrimmed_replay_is_forward(model_of: Models) -> None:
    model = model_of("nano")
    assert torch.equal(sequence(model, 40).step(0, 40), sequence(model, 40, replay=False).step(0, 40))


@pytest.mark.parametrize("preset", ["nano", pytest.param("mini", marks=pytest.mark.slow)])
def test_trimmed_is_close_but_not_equal(model_of: Models, preset: str) -> None:
    model = model_of(preset)
    w = model.config.sliding_window
    n = 8 * w
    a, b = sequence(model, n).step(0, n, keep=w), sequence(model, n, replay=False).step(0, n)
    cosine = torch.cosine_similarity(a[0, -1], b[0, -1], dim=0)
    assert 0.9 < cosine < 1
    assert not torch.equal(a[0, -1], b[0, -1])


def test_global_entries_do_not_depend_on_trimming(model_of: Models) -> None:
    model = model_of("nano")
    a, b = sequence(model, 64), sequence(model, 64, replay=False)
    a.step(0, 64, keep=8)
    b.step(0, 64)
    for x, y in zip((*a.caches.latent, *a.caches.index_key), (*b.caches.latent, *b.caches.index_key), strict=True):
        assert torch.equal(x, y)
    cut = model.config.cut
    for layer in range(cut + 1):
        assert torch.equal(a.caches.window[layer], b.caches.window[layer])


@pytest.mark.parametrize("numerics", ["exact32", "qat_bf16"])
def test_both_late_starts_agree(model_of: Models, numerics: str) -> None:
    """The query side of the cut layer on the kept rows, or on all rows and then trimmed."""
    model = model_of("nano", numerics)
    outs = []
    for late_start in ("cut", "cut+1"):
        seq = sequence(model, 60)
        seq.forward = lambda b, c, s=late_start: model.replay(b, c, late_start=s)
        outs.append(torch.cat([seq.step(0, 50, keep=8), seq.decode(50, 53)], dim=1))
    torch.testing.assert_close(*outs, atol=1e-5 if numerics == "exact32" else 0.25, rtol=0)


@pytest.mark.parametrize("edges", [[0, 60], [0, 31, 60], [0, 20, 40, 60], [0, 45, 46, 60]], ids=str)
def test_exact_kept_rows(model_of: Models, edges: list[int]) -> None:
    keep_exactly(model_of("nano"), edges)


@pytest.mark.slow
def test_exact_kept_rows_on_mini(model_of: Models) -> None:
    keep_exactly(model_of("mini"), [0, 170, 330])


def keep_exactly(model: Transformer, edges: list[int]) -> None:
    """Keeping P rows gives what keeping all gives."""
    _, keep = exact_lengths(model)
    end = edges[-1]
    seq, cold = sequence(model, end + 3), sequence(model, end + 3, replay=False)
    for a, b in zip(edges, edges[1:], strict=False):
        got, want = seq.step(a, b, keep=keep), cold.step(a, b)
    torch.testing.assert_close(got[:, -1], want[:, -1], atol=2e-5, rtol=0)
    torch.testing.assert_close(seq.decode(end, end + 3), cold.decode(end, end + 3), atol=2e-5, rtol=0)


def test_one_row_less_than_exact_differs(model_of: Models) -> None:
    model = model_of("nano")
    _, keep = exact_lengths(model)
    short = sequence(model, 60).step(0, 60, keep=keep - 1)[:, -1]
    full = sequence(model, 60, replay=False).step(0, 60)[:, -1]
    assert (short - full).abs().max() > 1e-6


@pytest.mark.parametrize("chunks", [[160], [100, 160], [97, 98, 130, 160]], ids=str)
def test_exact_restart_after_a_hit(model_of: Models, chunks: list[int]) -> None:
    restart_exactly(model_of("nano"), 96, chunks)


@pytest.mark.slow
def test_exact_restart_after_a_hit_on_mini(model_of: Models) -> None:
    restart_exactly(model_of("mini"), 384, [300, 430])


def restart_exactly(model: Transformer, hit: int, chunks: list[int]) -> None:
    """Restarting R tokens before the hit, without rewriting global entries, gives the cold run's logits."""
    restart, keep = exact_lengths(model)
    cold = sequence(model, chunks[-1], replay=False)
    want = cold.step(0, chunks[-1])
    warm = sequence(model, chunks[-1])
    warm.step(0, hit)
    before = [t.clone() for t in (*warm.caches.latent, *warm.caches.index_key)]
    for ring in (*warm.caches.window, *warm.caches.group):
        ring.fill_(float("nan"))
    start = hit - restart
    for end in chunks:
        late_floor = max(hit - restart, end - keep) if end - start > keep else hit - restart
        got = warm.step(start, end, write_from=hit, window_floor=hit - restart, keep=keep, late_floor=late_floor)
        start = end
    torch.testing.assert_close(got[:, -1], want[:, -1], atol=2e-5, rtol=0)
    for old, new in zip(before, (*warm.caches.latent, *warm.caches.index_key), strict=True):
        cached = slice(1, 1 + hit // 16)
        assert torch.equal(old[cached], new[cached])


@pytest.mark.parametrize("count", [7, 8, 14, 15, 6])
def test_chunks_around_the_window_read_the_ring(model_of: Models, count: int) -> None:
    """q = W-1, W, 2W-2, 2W-1 (and fewer) rows at c > 0: what the chunk reads of the ring is what was written."""
    model = model_of("nano")
    seq, cold = sequence(model, 60 + count), sequence(model, 60 + count, replay=False)
    seq.step(0, 60)
    cold.step(0, 60)
    for ring in (*seq.caches.window, *seq.caches.group):
        ring[0] = float("nan")
    got, want = seq.step(60, 60 + count, keep=8), cold.step(60, 60 + count)
    assert torch.isfinite(got).all()
    if count <= 8:
        torch.testing.assert_close(got, want, atol=1e-5, rtol=0)


def test_mixed_batch_equals_each_alone(model_of: Models) -> None:
    """A decode row, a prefix hit and a trimmed chunk in one step."""
    from precede.model.batch import StepBatch, StepRequest
    from precede.model.cache import allocate

    model = model_of("nano")
    layout = CacheLayout.of(model.config, model.numerics, page_size=16)
    model.set_layout(layout)
    rng = random.Random(1)
    ids = [[rng.randrange(3, 500) for _ in range(n)] for n in (34, 50, 60)]
    pages = [[1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    caches = allocate(layout, pages=12, rings=4)

    def request(i: int, start: int, end: int, **fields: int) -> StepRequest:
        return StepRequest(token_ids=ids[i][:end], start=start, pages=pages[i], ring=i + 1, **fields)  # type: ignore[arg-type]

    model(StepBatch.of([request(0, 0, 33)], layout), caches)
    model(StepBatch.of([request(1, 0, 32)], layout), caches)
    kept = [t.clone() for t in (*caches.window, *caches.latent, *caches.index_key, *caches.group)]
    last = [request(0, 33, 34), request(1, 24, 50, write_from=32, window_floor=24, keep=8), request(2, 0, 60, keep=8)]
    together = model.replay(StepBatch.of(last, layout, rows=100, slots=4, kept=20), caches)
    for i, r in enumerate(last):
        for t, old in zip((*caches.window, *caches.latent, *caches.index_key, *caches.group), kept, strict=True):
            t.copy_(old)
        alone = model.replay(StepBatch.of([r], layout), caches)
        torch.testing.assert_close(together[i : i + 1], alone, atol=1e-5, rtol=0)
