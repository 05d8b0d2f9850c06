from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from precede.model.formats import (
    decode_fp4,
    decode_fp8,
    decode_rows,
    encode_fp4,
    encode_fp8,
    encode_rows,
    exact_bytes,
)
from precede.model.quant import encode_e2m1, pack_nibbles, round_e2m1

EVERY_E4M3 = torch.tensor([c for c in range(256) if c & 127 != 127] + [0, 0], dtype=torch.uint8).view(8, 32)
EVERY_PAIR = torch.arange(256, dtype=torch.uint8).view(16, 16)


def bits(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.int32)


def scales(rows: int, byte: int) -> torch.Tensor:
    return torch.full((rows, 1), byte, dtype=torch.uint8)


def test_every_e4m3_code_with_every_scale():
    for byte in range(255):
        check_e4m3(byte)


def check_e4m3(byte: int) -> None:
    values = decode_rows(EVERY_E4M3.view(torch.float8_e4m3fn), scales(8, byte))
    wanted = EVERY_E4M3.view(torch.float8_e4m3fn).double() * 2.0 ** (byte - 127)
    low, high = exact_bytes("fp8")
    if byte <= high:
        assert torch.equal(values.double(), wanted)
        assert torch.equal(bits(decode_rows(*encode_rows(values))), bits(values))
        assert torch.equal(bits(decode_fp8(*encode_fp8(values))), bits(values))
    assert (torch.equal(values.bfloat16().double(), wanted)) == (low <= byte <= high)


def test_every_fp4_byte_with_every_scale():
    for byte in range(255):
        check_fp4(byte)


def check_fp4(byte: int) -> None:
    values = decode_fp4(EVERY_PAIR.view(torch.int8), scales(16, byte))
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    grid = torch.cat((grid, -grid))
    pairs = torch.stack((grid[EVERY_PAIR.long() & 15], grid[EVERY_PAIR.long() >> 4]), dim=-1)
    wanted = pairs.flatten(-2) * 2.0 ** (byte - 127)
    if byte <= exact_bytes("fp4")[1]:
        assert torch.equal(values.double(), wanted)
        assert torch.equal(values.bfloat16().float(), values)
        assert torch.equal(bits(decode_fp4(*encode_fp4(values))), bits(values))
    else:
        assert not values.isfinite().all()


def test_byte_255_decodes_to_nan():
    assert decode_rows(EVERY_E4M3.view(torch.float8_e4m3fn), scales(8, 255)).isnan().all()


def test_low_nibble_is_the_even_column():
    packed = torch.zeros(1, 16, dtype=torch.int8)
    packed[0, 0] = 0x72  # low 2 -> 1.0, high 7 -> 6.0
    assert decode_fp4(packed, scales(1, 128))[0, :3].tolist() == [2.0, 12.0, 0.0]


def test_fp8_scale_covers_a_tile_of_rows_and_columns():
    codes = torch.ones(40, 64).to(torch.float8_e4m3fn)
    scale = torch.tensor([[127, 128], [129, 130]], dtype=torch.uint8)
    values = decode_fp8(codes, scale)
    assert values[0, 0] == values[31, 31] == 1.0
    assert values[0, 32] == 2.0
    assert values[32, 0] == 4.0
    assert values[39, 63] == 8.0


def test_zero_blocks_have_scale_one():
    for encode, decode in ((encode_fp8, decode_fp8), (encode_rows, decode_rows), (encode_fp4, decode_fp4)):
        codes, scale = encode(torch.zeros(33, 64))
        assert scale.unique().tolist() == [127]
        assert not decode(codes, scale).any()


def test_halfway_values_go_to_the_even_code():
    ties = torch.zeros(1, 32)
    ties[0, :8] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
    codes, scale = encode_fp4(ties)
    assert scale.item() == 127
    assert decode_fp4(codes, scale)[0, :8].tolist() == [0, 1, 1, 2, 2, 4, 4, 6]


def test_short_fp4_rounding_equals_the_reference_rounding():
    torch.manual_seed(0)
    values = torch.randn(64, 64)
    values[:, 0] = values[:, 32] = 6.0  # both blocks of a row get scale 1
    codes, scale = encode_fp4(values)
    assert scale.unique().tolist() == [127]
    assert torch.equal(codes.view(torch.uint8), pack_nibbles(encode_e2m1(round_e2m1(values))))


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 70),
    blocks=st.integers(1, 3),
    exponent=st.integers(-100, 100),
    seed=st.integers(0, 2**31 - 1),
    form=st.sampled_from(["fp8", "rows", "fp4"]),
)
def test_encoding_is_nearest_within_the_format_and_stable(rows, blocks, exponent, seed, form):
    encode = {"fp8": encode_fp8, "rows": encode_rows, "fp4": encode_fp4}[form]
    decode = {"fp8": decode_fp8, "rows": decode_rows, "fp4": decode_fp4}[form]
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, 32 * blocks, generator=generator) * 2.0**exponent
    codes, scale = encode(values)
    decoded = decode(codes, scale)
    assert codes.shape == ((rows, 16 * blocks) if form == "fp4" else values.shape)
    assert scale.shape == ((-(-rows // 32) if form == "fp8" else rows), blocks)
    assert torch.equal(decode(*encode(decoded)), decoded)
    per_row = scale.repeat_interleave(32, 0)[:rows] if form == "fp8" else scale
    step = 2.0 ** (per_row.double() - 127).repeat_interleave(32, 1)
    error = (decoded.double() - values.double()).abs()
    # Half a unit in the last place: 1 bit of fraction for E2M1 from 0.5 on, 3 bits for E4M3 from 2^-6 on.
    bound = torch.maximum(
        values.double().abs() / (4 if form == "fp4" else 16), step * (0.25 if form == "fp4" else 2**-10)
    )
    assert (error <= bound).all()
