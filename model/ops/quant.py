"""Quantisers as ops: value in, value out (`quantize_*`), and to and from packed records (`pack_*`, `unpack_*`)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .. import quant
from .registry import op, training


def _vectors(g: torch.Generator) -> tuple[torch.Tensor]:
    return (torch.randn(6, 64, generator=g),)


_QUANTIZE = {
    "fp8": (quant.quantize_fp8, quant.pack_fp8, quant.unpack_fp8, (33, 32)),
    "mxfp4": (quant.quantize_mxfp4, quant.pack_mxfp4, quant.unpack_mxfp4, (17, 32)),
    "nvfp4": (quant.quantize_nvfp4, quant.pack_nvfp4, quant.unpack_nvfp4, (9, 16)),
}


def _register(kind: str) -> None:
    value, pack_, unpack_, (num, den) = _QUANTIZE[kind]

    def records(g: torch.Generator) -> tuple[torch.Tensor, torch.dtype]:
        return pack_(*_vectors(g)), torch.float32

    op(f"quantize_{kind}(Tensor x) -> Tensor", fake=torch.empty_like, inputs=_vectors)(value)
    op(
        f"pack_{kind}(Tensor x) -> Tensor",
        fake=lambda x: x.new_empty((*x.shape[:-1], x.shape[-1] * num // den), dtype=torch.uint8),
        inputs=_vectors,
    )(pack_)
    op(
        f"unpack_{kind}(Tensor record, ScalarType dtype) -> Tensor",
        fake=lambda record, dtype: record.new_empty((*record.shape[:-1], record.shape[-1] * den // num), dtype=dtype),
        inputs=records,
    )(unpack_)


for _kind in _QUANTIZE:
    _register(_kind)


def quantize(x: torch.Tensor, kind: str) -> torch.Tensor:
    """Quantise and dequantise the last axis ("none": x itself); while training, gradients pass straight through."""
    if kind == "none":
        return x
    if training(x):
        return x + (_QUANTIZE[kind][0](x) - x).detach()
    overload: Callable[[torch.Tensor], torch.Tensor] = getattr(torch.ops.precede, f"quantize_{kind}")
    return overload(x)


def pack(x: torch.Tensor, kind: str) -> torch.Tensor:
    """Packed uint8 records of the last axis (fp8, mxfp4, nvfp4)."""
    return getattr(torch.ops.precede, f"pack_{kind}")(x)


def unpack(record: torch.Tensor, kind: str, dtype: torch.dtype) -> torch.Tensor:
    """Values of packed records."""
    return getattr(torch.ops.precede, f"unpack_{kind}")(record, dtype)
