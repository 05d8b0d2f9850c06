"""Cache arithmetic as published, and what a layout refuses."""

from __future__ import annotations

import pytest
import torch

from precede.model.cache import CacheLayout, allocate
from precede.model.config import ModelConfig
from precede.model.errors import ConfigError
from precede.model.ops.kv import cache_write_reference, page_records

PUBLISHED, NANO = ModelConfig.preset("published"), ModelConfig.preset("nano")


def test_published_bytes() -> None:
    layout = CacheLayout.of(PUBLISHED, "native", store="packed")
    c = PUBLISHED
    assert (layout.latent.width(c.head_dim), layout.window.width(c.head_dim)) == (288, 528)
    assert layout.index_key.width(c.index_head_dim) == 68
    assert layout.page_bytes() == 113_920
    assert layout.bytes_per_token() == 890
    assert layout.ring_bytes() == 2_703_360 + 3 * 32 * 1024
    fp8 = CacheLayout.of(PUBLISHED, "native", store="packed", kv_format="fp8")
    assert (fp8.page_bytes(), fp8.bytes_per_token()) == (190_720, 1490)


def test_bytes_measured_from_allocated_pools_equal_the_computed_ones() -> None:
    layout = CacheLayout.of(PUBLISHED, "native", store="packed")
    caches = allocate(layout, pages=3, rings=2, device="meta")
    pools = sum(t.numel() * t.element_size() for t in (*caches.latent, *caches.index_key))
    rings = sum(t.numel() * t.element_size() for t in (*caches.window, *caches.group))
    assert (pools, rings) == (3 * layout.page_bytes(), 2 * layout.ring_bytes())
    assert caches.nbytes() == pools + rings


def test_values_take_the_compute_dtype() -> None:
    caches = allocate(CacheLayout.of(NANO, "exact32", page_size=16), pages=2, rings=2)
    assert {t.dtype for t in (*caches.window, *caches.latent, *caches.index_key)} == {torch.float32}
    assert allocate(CacheLayout.of(NANO, "native"), pages=2, rings=2).latent[0].dtype == torch.bfloat16
    assert (len(caches.window), len(caches.latent), len(caches.group)) == (10, 3, 2)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"page_size": 15}, "page_size"),
        ({"page_size": 0}, "page_size"),
        ({"lookahead": -1}, "lookahead"),
        ({"store": "zipped"}, "store"),
        ({"kv_format": "int8"}, "kv_format"),
        ({"numerics": "exact32", "store": "packed"}, "packed"),
        ({"numerics": "exact32", "kv_format": "nvfp4"}, "kv_quant"),
        ({"numerics": ("fp32", True, False), "kv_format": "bf16"}, "computes in fp32"),
    ],
)
def test_refusals(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CacheLayout.of(NANO, **{"numerics": "native", **fields})  # type: ignore[arg-type]


def test_group_ring_is_a_power_of_two() -> None:
    sizes = [CacheLayout.of(NANO, "native", lookahead=k).group_capacity for k in (0, 6, 7, 14, 15)]
    assert sizes == [8, 8, 16, 16, 32]


@pytest.mark.parametrize("values", [0, 4])
def test_write_then_read_whole_pages(values: int) -> None:
    pool = torch.full((4, 3, 6), 9.0)
    records = torch.arange(24.0).view(4, 6)
    cache_write_reference(pool, records, torch.tensor([3, -1, 5, 10]), values)
    got = page_records(pool, torch.tensor([1, 3]), values)
    want = torch.full((6, 6), 9.0)
    want[0], want[2], want[4] = records[0], records[2], records[3]
    assert torch.equal(got, want)
    assert bool((pool[0] == 9).all()), "page 0 belongs to nobody"
    if values:  # all leading parts of a page first
        assert torch.equal(pool[1].flatten()[:4], records[0, :4])
        assert torch.equal(pool[1].flatten()[12:14], records[0, 4:])
