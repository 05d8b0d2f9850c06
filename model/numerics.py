"""How exactly a model computes: three independent switches and the presets that name their combinations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from .errors import ConfigError

ComputeName = Literal["float32", "bfloat16"]


@dataclass(frozen=True, kw_only=True)
class Numerics:
    """Compute dtype, quantisation of the KV caches (part of the trained model), quantisation of linear inputs.

    `gemm_accumulate="float64"` is for tests: products are summed in double, so that the number of rows in a step cannot
    move a value across a rounding boundary.
    """

    compute: ComputeName
    kv_quant: bool
    act_quant: bool
    gemm_accumulate: Literal["float32", "float64"] = "float32"

    def __post_init__(self) -> None:
        if self.compute not in ("float32", "bfloat16"):
            raise ConfigError(f"compute dtype {self.compute!r} is unknown; choose float32 or bfloat16")
        if self.gemm_accumulate not in ("float32", "float64"):
            raise ConfigError(f"gemm_accumulate {self.gemm_accumulate!r} is unknown; choose float32 or float64")

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of activations."""
        return torch.float32 if self.compute == "float32" else torch.bfloat16

    @classmethod
    def of(cls, value: Numerics | str | Sequence[object]) -> Numerics:
        """A preset's name (exact32, qat_bf16, native), a triple (compute, kv_quant, act_quant), or Numerics itself."""
        if isinstance(value, Numerics):
            return value
        if isinstance(value, str):
            if value not in PRESETS:
                raise ConfigError(f"numerics {value!r} is unknown; choose one of {', '.join(PRESETS)}")
            return PRESETS[value]
        parts = tuple(value) if isinstance(value, Sequence) else ()
        names = {"float32": "float32", "fp32": "float32", "bfloat16": "bfloat16", "bf16": "bfloat16"}
        if (
            len(parts) == 3
            and isinstance(parts[0], str)
            and parts[0] in names
            and all(isinstance(p, bool) for p in parts[1:])
        ):
            return cls(compute=names[str(parts[0])], kv_quant=bool(parts[1]), act_quant=bool(parts[2]))  # type: ignore[arg-type]
        raise ConfigError(f"numerics {value!r} is neither a preset nor (compute dtype, kv_quant, act_quant)")

    def describe(self) -> str:
        """The preset's name, or the triple in words."""
        for name, preset in PRESETS.items():
            if preset == self:
                return name
        flags = f"{self.compute}, kv_quant={self.kv_quant}, act_quant={self.act_quant}"
        return flags + (", float64 sums" if self.gemm_accumulate == "float64" else "")


PRESETS: dict[str, Numerics] = {
    "exact32": Numerics(compute="float32", kv_quant=False, act_quant=False),
    "qat_bf16": Numerics(compute="bfloat16", kv_quant=True, act_quant=False),
    "native": Numerics(compute="bfloat16", kv_quant=True, act_quant=True),
}
