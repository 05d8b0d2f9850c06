"""A saved part as a callable.

A part is data (lowering/part.py). It is checked as a whole (program_check.py), then one flat function is generated from
the checked structure (program_source.py).

    program = Program.from_json(text)
    step = program.bind(weights)              # checks dtypes and shapes of all weights, once
    logits = step(caches, batch)
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch.utils import _pytree as pytree

from precede.lowering.errors import EngineMismatch
from precede.lowering.part import InputSpec, OutputSpec, PartSpec
from precede.model.batch import StepBatch
from precede.model.cache import Caches
from precede.model.errors import PrecedeError

from .program_check import check_part
from .program_profile import Profile, profile_step
from .program_source import DEVICE, generate

Check = Literal["always", "first", "never"]
_Getter = Callable[[Caches, StepBatch], torch.Tensor]


class Program:
    """A checked part, ready to be bound to weights."""

    def __init__(self, part: PartSpec) -> None:
        """Raises BundleError naming part, node and what is expected."""
        self.part = part
        self.source = generate(part, check_part(part))

    @classmethod
    def from_json(cls, data: str | bytes | Mapping[str, Any], *, source: str = "part") -> Program:
        """Parse and check the contents of `parts/NAME.json`; `source` names the file in messages.

        Raises BundleError.
        """
        return cls(PartSpec.parse(data, source=source))

    def bind(self, weights: Mapping[str, torch.Tensor], *, check: Check = "first") -> BoundProgram:
        """Fix the weights, found by their sources; the first one's device is the program's.

        `check` says when dtypes and shapes of caches and batch are compared with the declared ones: at every step, at
        the first step of each set of sizes, or never.
        Raises EngineMismatch for a weight that is missing, or has another dtype or shape.
        """
        return BoundProgram(self, weights, check)

    def __call__(self, weights: Mapping[str, torch.Tensor], caches: Caches, batch: StepBatch) -> Any:
        """Bind and run one step; for many steps, bind once."""
        return self.bind(weights)(caches, batch)


class BoundProgram:
    """A program with its weights: `step(caches, batch)` gives the logits [L, vocab] and writes the caches in place."""

    def __init__(self, program: Program, weights: Mapping[str, torch.Tensor], check: Check) -> None:
        self.program = program
        self.check: Check = check
        self._where = f"part {program.part.name}"
        self._seen: set[tuple[int, ...]] = set()
        self.device = self._check_weights(weights)
        bound = {name: weights[source] for name, source in program.source.weights.items()}
        self._names = {**bound, DEVICE: self.device}
        self._run = program.source.function(self._names)
        self._inputs = [(i, _getter(i.source)) for i in program.part.inputs if i.role != "weight"]
        self._sizes: dict[str, tuple[_Getter, int]] = {}
        for spec, get in self._inputs:
            for dim, size in enumerate(spec.shape):
                if isinstance(size, str):
                    self._sizes.setdefault(size, (get, dim))

    def __call__(self, caches: Caches, batch: StepBatch) -> Any:
        """One step, without gradients.

        Raises EngineMismatch if caches or batch do not fit the part's inputs, an operator refuses its arguments, or the
        results are not those declared.
        """
        sizes = self._check_step(caches, batch) if self.check != "never" else None
        try:
            with torch.inference_mode():
                result = self._run(caches, batch)
        except (PrecedeError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            node = self.program.source.failed_node(error)
            if node is None:
                raise
            text = str(error).strip() or type(error).__name__
            raise EngineMismatch(
                f"{self._where}, node {node.name} = {node.target}: {text.splitlines()[0]}; compile the engine again, "
                "or free memory if that is what is short"
            ) from error
        if sizes is not None:
            self._check_result(result, sizes)
        # A tensor made in inference mode refuses changes in place for ever; the caller's own copy does not.
        return pytree.tree_map_only(torch.Tensor, torch.clone, result)

    def profile(self, caches: Caches, batch: StepBatch, *, repeats: int = 3) -> Profile:
        """Where a step's time goes: ATen calls, and calls and seconds of every target, means over `repeats` steps.

        Steps run for real and write the caches. On CUDA the device is synchronised after each call.
        """
        self._check_step(caches, batch)
        return profile_step(self.program.source, self._names, caches, batch, repeats=repeats)

    def _check_weights(self, weights: Mapping[str, torch.Tensor]) -> torch.device:
        device: torch.device | None = None
        for spec in self.program.part.inputs:
            if spec.role != "weight":
                continue
            if spec.source not in weights:
                raise EngineMismatch(
                    f"{self._where}: weight {spec.source} ({_show(spec)}) is missing from the loaded model; "
                    "load the checkpoint that the engine was compiled from"
                )
            tensor = weights[spec.source]
            _check_tensor(tensor, spec, {}, self._where)
            device = device or tensor.device
        return device or torch.device("cpu")

    def _check_step(self, caches: Caches, batch: StepBatch) -> dict[str, int] | None:
        """The sizes of the step; None for sizes that were checked before."""
        sizes = {name: get(caches, batch).shape[dim] for name, (get, dim) in self._sizes.items()}
        key = tuple(sizes.values())
        if self.check == "first" and key in self._seen:
            return None
        for spec, get in self._inputs:
            _check_tensor(get(caches, batch), spec, sizes, self._where)
        for name, size in sizes.items():
            low, high = self.program.part.symbols[name]
            if size < low or (high is not None and size > high):
                bounds = f"at least {low}" if high is None else f"{low} to {high}"
                raise EngineMismatch(f"{self._where}: {name} is {size}, the engine was built for {bounds}")
        return sizes

    def _check_result(self, result: Any, sizes: Mapping[str, int]) -> None:
        outputs = self.program.part.outputs
        for spec, tensor in zip(outputs, result if len(outputs) > 1 else (result,), strict=True):
            _check_tensor(tensor, spec, sizes, f"{self._where}, output")
        self._seen.add(tuple(sizes.values()))


def _getter(source: str) -> _Getter:
    role, name, *index = source.split(".")
    attribute = operator.attrgetter(name)
    if role == "batch":
        return lambda caches, batch: attribute(batch)
    position = int(index[0])

    def get(caches: Caches, batch: StepBatch) -> torch.Tensor:
        stores = attribute(caches)
        if position >= len(stores):
            raise EngineMismatch(
                f"the engine reads {source}, but the caches have {len(stores)} stores {name}; "
                "allocate them from the engine's own layout"
            )
        return stores[position]

    return get


def _check_tensor(tensor: torch.Tensor, spec: InputSpec | OutputSpec, sizes: Mapping[str, int], where: str) -> None:
    expected = tuple(sizes[d] if isinstance(d, str) else d for d in spec.shape)
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype == spec.dtype and tensor.shape == expected:
        return
    known = "".join(f", {name} = {sizes[name]}" for name in dict.fromkeys(spec.shape) if isinstance(name, str))
    found = f"{dtype}[{', '.join(str(d) for d in tensor.shape)}]"
    name = spec.source if isinstance(spec, InputSpec) else spec.name
    raise EngineMismatch(f"{where}: {name} is {found}, the engine expects {_show(spec)}{known}")


def _show(spec: InputSpec | OutputSpec) -> str:
    return f"{spec.dtype}[{', '.join(str(d) for d in spec.shape)}]"
