"""Block quantisers: published vectors, every code and scale, ties, extremes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from precede.model import quant

KINDS = ("fp8", "mxfp4", "nvfp4")
QUANTIZE = {k: getattr(quant, f"quantize_{k}") for k in KINDS}
PACK = {k: getattr(quant, f"pack_{k}") for k in KINDS}
UNPACK = {k: getattr(quant, f"unpack_{k}") for k in KINDS}
VECTOR = torch.cat((torch.tensor([0.3, -1.7, 2.9, 0.05]), torch.zeros(28)))


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("fp8", [0.3125, -1.75, 3.0, 0.05078125]),
        ("mxfp4", [0.25, -1.5, 3.0, 0.0]),
        ("nvfp4", [0.234375, -1.875, 2.8125, 0.0]),
    ],
)
def test_published_vectors(kind: str, expected: list[float]) -> None:
    assert QUANTIZE[kind](VECTOR)[:4].tolist() == expected


def test_e2m1_ties_go_to_the_even_code() -> None:
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert quant.round_e2m1(ties).tolist() == [0, 1, 1, 2, 2, 4, 4]
    assert quant.round_e2m1(-ties).tolist() == [0, -1, -1, -2, -2, -4, -4]
    assert quant.round_e2m1(torch.tensor([7.0, -100.0])).tolist() == [6, -6]


def test_every_e2m1_code_round_trips() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    values = quant.decode_e2m1(codes)
    assert values[:8].tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert torch.equal(quant.encode_e2m1(values), codes)
    assert torch.equal(quant.unpack_nibbles(quant.pack_nibbles(codes)), codes)
    assert int(quant.pack_nibbles(torch.tensor([1, 2], dtype=torch.uint8))) == 0x21


def test_every_ue8m0_byte() -> None:
    values = quant.decode_ue8m0(torch.arange(256, dtype=torch.uint8))
    exact = [2.0 ** (b - 127) for b in range(255)]
    assert values[:255].double().tolist() == exact
    assert torch.isnan(values[255])


def test_pow2ceil_keeps_exact_powers() -> None:
    e = torch.arange(-126, 127)
    powers = torch.ldexp(torch.ones(e.shape), e)
    assert torch.equal(quant.pow2ceil_exponent(powers), (e + 127).int())
    above = torch.nextafter(powers, torch.tensor(float("inf")))
    assert torch.equal(quant.pow2ceil_exponent(above), (e + 128).clamp(max=254).int())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_records_read_back_the_same_values(kind: str, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(64, 96, generator=g) * torch.exp2(torch.randint(-30, 30, (64, 1), generator=g).float())
    x[0] = 0
    x[1, ::7] = 0
    x = x.to(dtype)
    record = PACK[kind](x)
    assert record.shape[-1] == {"fp8": 96 + 3, "mxfp4": 48 + 3, "nvfp4": 48 + 6}[kind]
    values = QUANTIZE[kind](x)
    assert values.dtype == dtype
    assert torch.equal(UNPACK[kind](record, dtype), values)


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_exact_in_bf16_and_a_fixed_point(kind: str) -> None:
    g = torch.Generator().manual_seed(1)
    x = torch.randn(256, 64, generator=g) * torch.exp2(torch.randint(-20, 20, (256, 1), generator=g).float())
    y = QUANTIZE[kind](x)
    assert torch.equal(y.bfloat16().float(), y)
    if kind != "nvfp4":  # an E4M3 scale of a quantised block need not be the scale that made it
        assert torch.equal(QUANTIZE[kind](y), y)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_error_bound(kind: str, data: st.DataObject) -> None:
    """No element is further from its value than half a step of the largest magnitude's binade."""
    exponent = data.draw(st.integers(-9 if kind == "nvfp4" else -40, 40))
    seed = data.draw(st.integers(0, 2**31))
    size = quant.BLOCK[kind]
    x = torch.randn(8, size, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    error = (QUANTIZE[kind](x) - x).abs().amax(-1)
    amax = x.abs().amax(-1)
    if kind == "nvfp4":
        amax = amax.clamp(max=quant.E4M3_MAX * quant.E2M1_MAX)
        x_out = x.abs().amax(-1) > amax
        error = torch.where(x_out, 0.0, error)
    bound = {"fp8": 1 / 16, "mxfp4": 1 / 3, "nvfp4": 0.25}[kind]
    floor = {"fp8": 2.0**-30, "mxfp4": 0.0, "nvfp4": 2.0**-9}[kind]
    assert bool((error <= amax * bound + floor).all())


@pytest.mark.parametrize("kind", KINDS)
def test_zeros_infinities_and_nan_do_not_trap(kind: str) -> None:
    size = quant.BLOCK[kind]
    x = torch.zeros(3, size)
    x[1, 0], x[2, 0] = float("inf"), float("nan")
    y = QUANTIZE[kind](x)
    assert torch.equal(y[0], x[0])
    PACK[kind](x)


@pytest.mark.parametrize("kind", KINDS)
def test_nan_survives_packing(kind: str) -> None:
    x = torch.ones(2, 64)
    x[1, 5] = float("nan")
    read = UNPACK[kind](PACK[kind](x), torch.float32)
    assert bool(read[1, 5].isnan())
    assert bool(read[0].isfinite().all())
    assert bool(read[1, 32:].isfinite().all())


def test_zero_bytes_are_a_record_of_zeros() -> None:
    for kind, width in (("fp8", 33), ("mxfp4", 17), ("nvfp4", 9)):
        assert not UNPACK[kind](torch.zeros(2, width, dtype=torch.uint8), torch.float32).any()
