"""The n-gram hash: published primes, multipliers and rows; chunk boundaries and dead tokens."""

from __future__ import annotations

import pytest
import torch

from precede.model.ngram import ngram_buckets, ngram_multipliers

PUBLISHED = ngram_buckets(2, 4, 8, 16_000_000)
DEAD = 99_999
IDS = [5, 17, 99091, 42, DEAD, 7]


def rows(layer: int, index: int, ids: list[int], start: int = 0) -> torch.Tensor:
    """Published table rows of positions start .. of a sequence of compressed ids; DEAD is the image token."""
    n = len(ids) - start
    before = ids[max(0, start - 3) : start][::-1]
    return torch.ops.precede.engram_hash(
        torch.tensor(ids[start:]),
        torch.arange(start, len(ids)),
        torch.zeros(n, dtype=torch.int64),
        torch.tensor([0]),
        torch.tensor([start]),
        torch.tensor([before + [-1] * (3 - len(before))]),
        torch.arange(100_000),
        torch.tensor([ngram_multipliers(layer, 4, 99092)]),
        torch.tensor([PUBLISHED.primes[index]]),
        torch.tensor([PUBLISHED.offsets[index]]),
        2,
        DEAD,
    )[:, 0]


def test_published_primes() -> None:
    base = 16_000_000
    first = [57, 79, 81, 97, 121, 129, 133, 183, 189, 207, 211, 253, 277, 289, 307, 321]
    first += [339, 381, 393, 399, 403, 409, 447, 463]
    second = [477, 487, 499, 507, 511, 573, 609, 627, 667, 669, 693, 697, 711, 729, 759, 769]
    second += [781, 799, 813, 819, 841, 877, 879, 889]
    assert PUBLISHED.primes == (tuple(base + p for p in first), tuple(base + p for p in second))
    assert PUBLISHED.rows() == (384006168, 384016682)
    assert ngram_buckets(2, 4, 2, 64).primes == ((67, 71, 73, 79, 83, 89), (97, 101, 103, 107, 109, 113))


def test_published_multipliers() -> None:
    assert ngram_multipliers(1, 4, 99092) == (76632096046245, 4839876093313, 35959672319349, 73987337458391)
    assert ngram_multipliers(14, 4, 99092) == (67716810739261, 51510806800915, 30921347202721, 82619226485591)
    assert ngram_multipliers(4, 4, 256)[0] == 31841131192811251


def test_published_rows() -> None:
    got = rows(1, 0, IDS)
    assert got[0].tolist() == [
        5412672, 18319159, 35492627, 60880252, 74962984, 95657733, 98005115, 127351390,
        143494632, 151789366, 171410756, 185435171, 207165545, 218031260, 226330336, 247008214,
        256353435, 276423911, 295874085, 305599364, 322749888, 348475788, 367405771, 372009279,
    ]  # fmt: skip
    assert got[3].tolist() == [
        13131409, 22107638, 46286683, 48259159, 69021570, 87090089, 104214597, 115341818,
        140379165, 149277239, 165642503, 181109295, 204355334, 208790699, 224459487, 255267031,
        266257160, 273065001, 303658883, 319159092, 334901315, 350627374, 352036528, 370256351,
    ]  # fmt: skip
    assert got[5, :4].tolist() == [8939594, 28321402, 40265357, 55817216]
    assert rows(14, 1, IDS)[3, :4].tolist() == [3275938, 25911066, 45539186, 51149320]


@pytest.mark.parametrize("start", range(1, 6))
def test_a_chunk_boundary_changes_nothing(start: int) -> None:
    assert torch.equal(rows(1, 0, IDS, start), rows(1, 0, IDS)[start:])


def test_rows_outside_the_table_read_as_zeros() -> None:
    table = torch.ones(4, 32).to(torch.float8_e4m3fn)
    scale = torch.full((4, 1), 127, dtype=torch.uint8)
    got = torch.ops.precede.engram_gather(table, scale, torch.tensor([[0, 4, -1]]), torch.bfloat16)
    assert got.dtype == torch.bfloat16
    assert got.view(3, 32).sum(1).tolist() == [32, 0, 0]
