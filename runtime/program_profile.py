"""Where the time of a program's step goes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from precede.model.batch import StepBatch
from precede.model.cache import Caches
from precede.model.ops.registry import NAMESPACE, OPS

from .program_source import StepSource


@dataclass(frozen=True, kw_only=True)
class TargetCost:
    """Calls and seconds of one operator in one step."""

    target: str
    calls: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Profile:
    """One step: seconds without instruments, ATen calls (leaf operators looked into), operators costliest first."""

    seconds: float
    aten_ops: int
    targets: tuple[TargetCost, ...]

    def top(self, count: int = 10) -> tuple[TargetCost, ...]:
        """The costliest operators."""
        return self.targets[:count]

    def __str__(self) -> str:
        lines = [f"{self.seconds * 1e3:.1f} ms a step, {self.aten_ops} ATen calls"]
        lines += [f"{t.seconds * 1e3:9.2f} ms {t.calls:6d} x  {t.target}" for t in self.top()]
        return "\n".join(lines)


def profile_step(
    source: StepSource, names: Mapping[str, Any], caches: Caches, batch: StepBatch, *, repeats: int
) -> Profile:
    """Run the step plainly, with a clock around every operator, and once counting ATen calls."""
    plain = source.function(names)
    totals: dict[str, list[float]] = {}
    clocked = {name: _clocked(source.names[name], totals, target) for name, target in source.operators.items()}
    instrumented = source.function({**names, **clocked})
    with torch.inference_mode():
        plain(caches, batch)
        begin = time.perf_counter()
        for _ in range(repeats):
            plain(caches, batch)
        _synchronize()
        seconds = (time.perf_counter() - begin) / repeats
        for _ in range(repeats):
            instrumented(caches, batch)
        with _Counter() as counter:
            plain(caches, batch)
    costs = [
        TargetCost(target=target, calls=round(calls / repeats), seconds=total / repeats)
        for target, (calls, total) in totals.items()
    ]
    return Profile(seconds=seconds, aten_ops=counter.count, targets=tuple(sorted(costs, key=lambda c: -c.seconds)))


def _clocked(function: Callable[..., Any], totals: dict[str, list[float]], target: str) -> Callable[..., Any]:
    entry = totals.setdefault(target, [0.0, 0.0])

    def call(*args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        result = function(*args, **kwargs)
        _synchronize()
        entry[0] += 1
        entry[1] += time.perf_counter() - begin
        return result

    return call


class _Counter(TorchDispatchMode):
    """Counts ATen calls that reach a kernel. Leaf operators run their references under it, to be looked into."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func.namespace == NAMESPACE:
            with self:
                return OPS[func._schema.name.partition("::")[2]].reference(*args, **(kwargs or {}))
        self.count += func.namespace == "aten"
        return func(*args, **(kwargs or {}))


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
