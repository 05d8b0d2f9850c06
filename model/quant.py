"""The published block quantisers: values, and the bytes they are stored as.

| name  | block | scale                                             | element        | used for                |
|-------|-------|---------------------------------------------------|----------------|-------------------------|
| fp8   | 32    | smallest 2^e with max(amax, 1e-4)/448 <= 2^e      | E4M3, <= 448   | linear inputs, window   |
| mxfp4 | 32    | smallest 2^e with max(amax, 6*2^-126)/6 <= 2^e    | E2M1, <= 6     | index queries and keys  |
| nvfp4 | 16    | E4M3(max(amax, 6*2^-9)/6), no scale of the tensor | E2M1, <= 6     | compressed (global) KV  |

Everything is computed in fp32 and every quantised value is exact in bf16: E4M3 and E2M1 carry at most 4 significant
bits, times a power of two or an E4M3 number at most 6, against 8 of bf16. Records hold the elements first, then the
scale bytes; of two FP4 elements in a byte the even one is the low nibble.
"""

from __future__ import annotations

import torch

E4M3_MAX = 448.0
E2M1_MAX = 6.0
FP8_FLOOR = 1e-4
MXFP4_FLOOR = 6.0 * 2.0**-126
NVFP4_FLOOR = 6.0 * 2.0**-9
BLOCK = {"fp8": 32, "mxfp4": 32, "nvfp4": 16}


def pow2ceil_exponent(t: torch.Tensor) -> torch.Tensor:
    """Biased exponent (int32, 1..254) of the smallest power of two >= t; t fp32 and positive.

    Taken from the bits, so an exact power stays itself; NaN and inf give 254.
    """
    bits = t.view(torch.int32)
    return ((bits >> 23) + ((bits & 0x7FFFFF) != 0).to(torch.int32)).clamp(1, 254)


def decode_ue8m0(code: torch.Tensor) -> torch.Tensor:
    """UE8M0 bytes (uint8) to fp32: 2^(b - 127); 255 is NaN."""
    e = code.to(torch.int32)
    bits = torch.where(e == 0, 0x00400000, torch.where(e == 255, 0x7FC00000, e << 23))
    return bits.view(torch.float32)


def round_e2m1(x: torch.Tensor) -> torch.Tensor:
    """Round fp32 to {0, .5, 1, 1.5, 2, 3, 4, 6} with sign, nearest, ties to the even code; saturates at 6."""
    a = x.abs().clamp(max=E2M1_MAX)
    step = torch.where(a < 2, 0.5, torch.where(a < 4, 1.0, 2.0))
    return torch.copysign(torch.round(a / step) * step, x)


def encode_e2m1(v: torch.Tensor) -> torch.Tensor:
    """Codes 0..15 (uint8, sign in bit 3) of fp32 values that already lie on the E2M1 grid."""
    a = v.abs()
    code = torch.where(a < 2, a * 2, torch.where(a < 4, a + 2, a / 2 + 4)).to(torch.uint8)
    return code | (torch.signbit(v).to(torch.uint8) << 3)


def decode_e2m1(code: torch.Tensor) -> torch.Tensor:
    """Codes 0..15 (integer) to fp32."""
    c = (code & 7).to(torch.float32)
    a = torch.where(c < 4, c / 2, torch.where(c < 6, c - 2, c * 2 - 8))
    return torch.where((code & 8) != 0, -a, a)


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """[..., n] codes to [..., n/2] bytes, even element in the low nibble."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """[..., n] bytes to [..., 2n] codes, low nibble first."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def _blocks(x: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    b = x.to(torch.float32).unflatten(-1, (-1, BLOCK[kind]))
    return b, b.abs().amax(-1, keepdim=True)


def _fp8_parts(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Elements (float8_e4m3fn, blocked) and biased scale exponents (int32)."""
    b, amax = _blocks(x, "fp8")
    e = pow2ceil_exponent(amax.clamp(min=FP8_FLOOR) * (1.0 / E4M3_MAX))
    scaled = (b / (e << 23).view(torch.float32)).clamp(-E4M3_MAX, E4M3_MAX)
    return scaled.to(torch.float8_e4m3fn), e


def _mxfp4_parts(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Grid values (fp32, blocked) and biased scale exponents (int32)."""
    b, amax = _blocks(x, "mxfp4")
    e = pow2ceil_exponent(amax.clamp(min=MXFP4_FLOOR) * (1.0 / E2M1_MAX))
    return round_e2m1(b / (e << 23).view(torch.float32)), e


def _nvfp4_parts(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Grid values (fp32, blocked) and scales (float8_e4m3fn)."""
    b, amax = _blocks(x, "nvfp4")
    s = (amax.clamp(min=NVFP4_FLOOR) / E2M1_MAX).clamp(max=E4M3_MAX).to(torch.float8_e4m3fn)
    return round_e2m1(b / s.to(torch.float32)), s


def quantize_fp8(x: torch.Tensor) -> torch.Tensor:
    """Quantise and dequantise the last axis in blocks of 32; any float dtype in, the same out."""
    v, e = _fp8_parts(x)
    return (v.to(torch.float32) * (e << 23).view(torch.float32)).flatten(-2).to(x.dtype)


def quantize_mxfp4(x: torch.Tensor) -> torch.Tensor:
    """Quantise and dequantise the last axis in blocks of 32 with power-of-two scales."""
    v, e = _mxfp4_parts(x)
    return (v * (e << 23).view(torch.float32)).flatten(-2).to(x.dtype)


def quantize_nvfp4(x: torch.Tensor) -> torch.Tensor:
    """Quantise and dequantise the last axis in blocks of 16 with E4M3 scales."""
    v, s = _nvfp4_parts(x)
    return (v * s.to(torch.float32)).flatten(-2).to(x.dtype)


def pack_fp8(x: torch.Tensor) -> torch.Tensor:
    """[..., d] to uint8 [..., d + d/32]: E4M3 elements, then UE8M0 scales."""
    v, e = _fp8_parts(x)
    return torch.cat((v.view(torch.uint8).flatten(-2), e.to(torch.uint8).squeeze(-1)), dim=-1)


def pack_mxfp4(x: torch.Tensor) -> torch.Tensor:
    """[..., d] to uint8 [..., d/2 + d/32]: nibble pairs, then UE8M0 scales."""
    v, e = _mxfp4_parts(x)
    e = torch.where(torch.isnan(v).any(-1, keepdim=True), 255, e)  # E2M1 has no NaN, its scale byte has
    return torch.cat((pack_nibbles(encode_e2m1(v.flatten(-2))), e.to(torch.uint8).squeeze(-1)), dim=-1)


def pack_nvfp4(x: torch.Tensor) -> torch.Tensor:
    """[..., d] to uint8 [..., d/2 + d/16]: nibble pairs, then E4M3 scales."""
    v, s = _nvfp4_parts(x)
    return torch.cat((pack_nibbles(encode_e2m1(v.flatten(-2))), s.view(torch.uint8).squeeze(-1)), dim=-1)


def unpack_fp8(record: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """uint8 [..., d + d/32] to `dtype` [..., d]; the inverse of pack_fp8 up to its rounding."""
    d = record.shape[-1] * 32 // 33
    v = record[..., :d].contiguous().view(torch.float8_e4m3fn).to(torch.float32).unflatten(-1, (-1, 32))
    return (v * decode_ue8m0(record[..., d:]).unsqueeze(-1)).flatten(-2).to(dtype)


def unpack_mxfp4(record: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """uint8 [..., d/2 + d/32] to `dtype` [..., d]."""
    half = record.shape[-1] * 16 // 17
    v = decode_e2m1(unpack_nibbles(record[..., :half])).unflatten(-1, (-1, 32))
    return (v * decode_ue8m0(record[..., half:]).unsqueeze(-1)).flatten(-2).to(dtype)


def unpack_nvfp4(record: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """uint8 [..., d/2 + d/16] to `dtype` [..., d]."""
    half = record.shape[-1] * 8 // 9
    v = decode_e2m1(unpack_nibbles(record[..., :half])).unflatten(-1, (-1, 16))
    s = record[..., half:].contiguous().view(torch.float8_e4m3fn).to(torch.float32)
    return (v * s.unsqueeze(-1)).flatten(-2).to(dtype)
