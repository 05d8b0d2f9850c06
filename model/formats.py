"""Stored weight formats: FP8, packed FP4 and Engram rows, to and from fp32.

A stored value is `element * 2^(byte - 127)`: an E4M3 or E2M1 element and the UE8M0 byte of its block. Dense weights
share a byte per 32x32 tile, experts and Engram rows per row and 32 columns. An FP4 byte holds the even column in its
low nibble. Decoding multiplies by a power of two, so it is exact in fp32 unless it overflows, and exact in bf16 for
every scale byte that `exact_bytes` names. Encoders take the smallest scale that keeps a block inside the format (no
floor: weights are not activations); a block that was decoded once is encoded without any change of value.
"""

from __future__ import annotations

from functools import cache

import torch

from .quant import (
    E2M1_MAX,
    E4M3_MAX,
    decode_e2m1,
    decode_ue8m0,
    pack_nibbles,
    pow2ceil_exponent,
    unpack_nibbles,
)
from .table import BLOCK, Kind

NAN_BYTE = 255


def exact_bytes(kind: Kind) -> tuple[int, int]:
    """First and last scale byte with which every code of the stored `kind` is a finite bf16 number."""
    return (0, 252) if kind == "fp4" else (3, 246)


def decode_fp8(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """fp32 [N, K] of float8_e4m3fn codes [N, K] and uint8 scales [ceil(N/32), K/32], one a 32x32 tile."""
    return decode_rows(codes, _per_row(scale, codes.shape[0]))


def decode_rows(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """fp32 [N, K] of float8_e4m3fn codes [N, K] and uint8 scales [N, K/32], one a row and 32 columns."""
    return _times(codes.to(torch.float32), scale)


def decode_fp4(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """fp32 [N, K] of packed bytes int8 [N, K/2] and uint8 scales [N, K/32], one a row and 32 columns."""
    pairs = _nibble_pairs(packed.device)
    values = pairs.index_select(0, packed.view(torch.uint8).flatten().to(torch.int32)).view(torch.float32)
    return _times(values.view(packed.shape[0], -1), scale)


@cache
def _nibble_pairs(device: torch.device) -> torch.Tensor:
    """int64 [256]: the two fp32 values of every byte as one element, so that a byte costs one lookup."""
    every_byte = torch.arange(256, dtype=torch.uint8, device=device).unsqueeze(1)
    return decode_e2m1(unpack_nibbles(every_byte)).view(torch.int64).flatten()


def encode_fp8(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(float8_e4m3fn [N, K], uint8 [ceil(N/32), K/32]) of fp32 [N, K]: one scale a 32x32 tile."""
    n, k = values.shape
    tiles = -(-n // BLOCK)
    padded = torch.nn.functional.pad(values.abs(), (0, 0, 0, tiles * BLOCK - n))
    scale = _scale_byte(padded.view(tiles, BLOCK, k // BLOCK, BLOCK).amax(dim=(1, 3)), E4M3_MAX)
    return _e4m3(values, _per_row(scale, n)), scale


def encode_rows(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(float8_e4m3fn [N, K], uint8 [N, K/32]) of fp32 [N, K]: one scale a row and 32 columns."""
    scale = _scale_byte(_blocks(values).abs().amax(dim=-1), E4M3_MAX)
    return _e4m3(values, scale), scale


def encode_fp4(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(int8 [N, K/2] of two E2M1 codes a byte, uint8 [N, K/32]) of fp32 [N, K]; halves go to the even code."""
    scale = _scale_byte(_blocks(values).abs().amax(dim=-1), E2M1_MAX)
    return pack_nibbles(_e2m1_codes(_over(values, scale))).view(torch.int8), scale


def _e2m1_codes(values: torch.Tensor) -> torch.Tensor:
    """Codes 0..15 of fp32 values up to 6, rounded to nearest even: quant.round_e2m1 and encode_e2m1 in one.

    Codes grow by 2, 1 and 1/2 a unit below 2, below 4 and up to 6, so the code is the smallest of three roundings.
    """
    a = values.abs().clamp_(max=E2M1_MAX)
    code = torch.minimum((a * 2).round_(), a.round().add_(2))
    code = torch.minimum(code, a.mul_(0.5).round_().add_(4))
    return code.to(torch.uint8) | (torch.signbit(values).to(torch.uint8) << 3)


def _scale_byte(amax: torch.Tensor, largest: float) -> torch.Tensor:
    """UE8M0 byte of the smallest power of two p with amax / p <= largest; a block of zeros gets 127, p = 1."""
    quotient = amax / largest
    byte = torch.where(quotient <= 2.0**-127, 0, pow2ceil_exponent(quotient))
    return torch.where(amax == 0, 127, byte).to(torch.uint8)


def _blocks(values: torch.Tensor) -> torch.Tensor:
    return values.unflatten(-1, (-1, BLOCK))


def _per_row(tiles: torch.Tensor, rows: int) -> torch.Tensor:
    return tiles.repeat_interleave(BLOCK, dim=0)[:rows]


def _times(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (_blocks(values) * decode_ue8m0(scale).unsqueeze(-1)).flatten(-2)


def _over(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (_blocks(values) / decode_ue8m0(scale).unsqueeze(-1)).flatten(-2)


def _e4m3(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return _over(values, scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
