"""What a user may ask of a compilation: one frozen record, checked when it is made, kept in the engine's manifest."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

from precede.model.errors import PrecedeError, shown

if TYPE_CHECKING:
    from precede.model.numerics import Numerics
    from precede.passes.manager import Pass

CHOICES: dict[str, tuple[str, ...]] = {
    "target": ("host", "cpu", "sm_90", "sm_100", "sm_120"),
    "backend": ("auto", "reference", "inductor", "program", "tensorrt"),
    "kv_format": ("auto", "nvfp4", "fp8", "bf16"),
    "late_start": ("cut", "cut+1"),
    "verify": ("off", "structure", "numerics"),
}

# The one value that this version implements, and why another one cannot be honoured.
ONLY: dict[str, tuple[Any, str]] = {
    "tensor_parallel": (1, "this version compiles for one device"),
    "data_parallel": (1, "this version compiles for one device"),
    "quantize": ({}, "this version keeps every weight in the format of the checkpoint"),
    "late_start": ("cut", "this version builds one part and has no replay split to move"),
    "overlap_up_to": (16, "this version has no side stream whose threshold it could set"),
}


class OptionsError(PrecedeError):
    """A compile option with a value that is wrong or not implemented; names the option and what is accepted."""


@dataclass(frozen=True, kw_only=True)
class CompileOptions:
    """Options of `compile_model`. Raises OptionsError for a value that is wrong or that this version cannot honour.

    target              what the engine is for: "host" (this machine), "cpu", "sm_90", "sm_100", "sm_120"
    backend             "auto", or one by name; an unavailable one raises BackendUnavailable at compile time
    numerics            "exact32", "qat_bf16", "native", or (compute dtype, kv_quant, act_quant)
    swa_bounded_replay  whether an engine may skip rows that only a sliding window would need
    late_start          first layer that runs on kept rows only: the "cut" or "cut+1"
    quantize            parameter name pattern -> "nvfp4" | "fp8" | "none"
    overlap_up_to       rows of a step up to which a side stream is used
    page_size           tokens of a page of the global KV pools
    kv_format           how latents are stored; "auto": nvfp4 where kv_quant is on, else plain values
    lookahead           extra window rows for tokens that may be taken back
    disable             names of passes to leave out
    extra_passes        passes that run after the built-in ones
    stop_after          name of the last pass to run
    verify              checks after every pass: "off", "structure", or "numerics" (also runs it before and after)
    allow_misses        accept a fusion that matched less often than the config says
    """

    target: str = "host"
    backend: str = "auto"
    numerics: str | tuple[str, bool, bool] = "native"
    tensor_parallel: int = 1
    data_parallel: int = 1
    swa_bounded_replay: bool = True
    late_start: Literal["cut", "cut+1"] = "cut"
    quantize: Mapping[str, str] = field(default_factory=dict)
    overlap_up_to: int = 16
    page_size: int = 128
    kv_format: Literal["auto", "nvfp4", "fp8", "bf16"] = "auto"
    lookahead: int = 0
    disable: Collection[str] = ()
    extra_passes: tuple[Pass, ...] = ()
    stop_after: str | None = None
    verify: Literal["off", "structure", "numerics"] = "structure"
    allow_misses: bool = False

    def __post_init__(self) -> None:
        from precede.model.numerics import Numerics

        for name, accepted in CHOICES.items():
            value = getattr(self, name)
            if not isinstance(value, str) or value not in accepted:
                raise OptionsError(f"{name} = {shown(value)}; choose one of {', '.join(accepted)}")
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise OptionsError(f"{name} = {shown(value)}; it takes an integer of at least {least}")
        for name in ("swa_bounded_replay", "allow_misses"):
            if not isinstance(getattr(self, name), bool):
                raise OptionsError(f"{name} = {shown(getattr(self, name))}; it takes True or False")
        names = not isinstance(self.disable, str) and isinstance(self.disable, Collection)
        if not names or not all(isinstance(n, str) for n in self.disable):
            raise OptionsError(f"disable = {shown(self.disable)}; it takes a collection of pass names")
        if self.stop_after is not None and not isinstance(self.stop_after, str):
            raise OptionsError(f"stop_after = {shown(self.stop_after)}; it takes the name of a pass")
        if not isinstance(self.quantize, Mapping):
            raise OptionsError(f"quantize = {shown(self.quantize)}; it takes a mapping from name pattern to format")
        for name, (only, reason) in ONLY.items():
            value = getattr(self, name)
            if value != only:
                raise OptionsError(f"{name} = {shown(value)} is not implemented: {reason}; leave it at {only!r}")
        if not isinstance(self.extra_passes, list | tuple):
            raise OptionsError(f"extra_passes = {shown(self.extra_passes)}; it takes a list of passes")
        for extra in self.extra_passes:
            methods = all(callable(getattr(extra, method, None)) for method in ("run", "expects"))
            if not isinstance(getattr(extra, "name", None), str) or not methods or isinstance(extra, type):
                raise OptionsError(
                    f"extra_passes holds {shown(extra)}, which has no name, expects(graph, context) and "
                    "run(graph, context)"
                )
            if getattr(extra, "numerics", None) not in ("exact", "tolerance"):
                raise OptionsError(f"extra pass {extra.name!r} has no numerics; give it 'exact' or 'tolerance'")
            if not re.fullmatch(r"\w[\w.-]*", extra.name):
                raise OptionsError(
                    f"extra pass {extra.name!r} has a name that cannot name its files; use letters, digits, _ . and -"
                )
        if not isinstance(self.numerics, str | tuple | list):
            raise OptionsError(
                f"numerics = {shown(self.numerics)}; it takes a preset's name or (compute, kv_quant, act_quant)"
            )
        Numerics.of(self.numerics)
        object.__setattr__(self, "disable", tuple(sorted(set(self.disable))))
        object.__setattr__(self, "extra_passes", tuple(self.extra_passes))
        if not isinstance(self.numerics, str):
            object.__setattr__(self, "numerics", tuple(self.numerics))

    def resolved_numerics(self) -> Numerics:
        """The numerics switches that `numerics` names."""
        from precede.model.numerics import Numerics

        return Numerics.of(self.numerics)

    def to_json(self) -> dict[str, Any]:
        """A JSON object with one key an option; extra passes by name."""
        data: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        data["numerics"] = self.numerics if isinstance(self.numerics, str) else list(self.numerics)
        data["quantize"] = dict(self.quantize)
        data["disable"] = list(self.disable)
        data["extra_passes"] = [extra.name for extra in self.extra_passes]
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any], *, extra_passes: Sequence[Pass] = ()) -> CompileOptions:
        """The options that `to_json` wrote. Passes cannot be restored from a name: give those of the record.

        Raises OptionsError for an unknown key, a wrong value, or extra passes other than the recorded ones.
        """
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(data) - known)
        if unknown:
            raise OptionsError(f"unknown option {unknown[0]!r}; there are {', '.join(sorted(known))}")
        recorded = list(data.get("extra_passes", []))
        given = [extra.name for extra in extra_passes]
        if recorded != given:
            raise OptionsError(f"the options were recorded with extra passes {recorded}, given are {given}")
        values = dict(data)
        values["extra_passes"] = tuple(extra_passes)
        if isinstance(values.get("numerics"), list):
            values["numerics"] = tuple(values["numerics"])
        return cls(**values)

    def fingerprint(self) -> str:
        """SHA-256 of the canonical JSON."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()


_LEAST = {"tensor_parallel": 1, "data_parallel": 1, "overlap_up_to": 0, "page_size": 1, "lookahead": 0}
