"""A saved engine, loaded: the folder is checked, its weights are decoded, its program is bound.

Nothing here imports the compiler; what runs is what the folder says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path

import torch

from precede.lowering.bundle import Bundle, read_bundle
from precede.lowering.errors import EngineMismatch
from precede.lowering.manifest import Manifest
from precede.model.batch import StepBatch, StepRequest
from precede.model.cache import CacheLayout, Caches, allocate
from precede.model.checkpoint import load_checkpoint
from precede.model.config import ModelConfig

from .program import BoundProgram, Program
from .program_profile import Profile
from .tokenizer import Tokenizer

MAIN = "main"


class Engine:
    """`engine(batch, caches)` gives the logits fp32 [L, vocab] of one step and writes the caches in place."""

    def __init__(self, bundle: Bundle, step: BoundProgram) -> None:
        self.bundle = bundle
        self.step = step

    def __call__(self, batch: StepBatch, caches: Caches) -> torch.Tensor:
        """One step. Raises EngineMismatch if caches or batch do not fit the program, BatchError if it trims rows."""
        batch.require_untrimmed()
        return self.step(caches, batch)

    def allocate(self, *, pages: int, rings: int) -> Caches:
        """Zeroed caches; page 0 and ring 0 are included and belong to nobody."""
        return allocate(self.layout, pages=pages, rings=rings, device=self.step.device)

    def profile(self, lengths: Sequence[int]) -> Profile:
        """Where the time of a decode step goes that adds one token to requests of these lengths (empty caches)."""
        size, first = self.layout.page_size, 1
        requests = []
        for ring, length in enumerate(lengths, 1):
            pages = range(first, first + -(-(length + 1) // size))
            token_ids = [self.config.bos_token_id] * (length + 1)
            requests.append(StepRequest(token_ids=token_ids, start=length, pages=pages, ring=ring))
            first = pages.stop
        caches = self.allocate(pages=first, rings=len(requests) + 1)
        return self.step.profile(caches, StepBatch.of(requests, self.layout))

    @property
    def manifest(self) -> Manifest:
        """What the engine was built from, for and with."""
        return self.bundle.manifest

    @property
    def config(self) -> ModelConfig:
        """The model's config."""
        return self.bundle.config

    @property
    def layout(self) -> CacheLayout:
        """Shapes and formats of the caches that the program reads and writes."""
        return self.bundle.layout

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer in the engine folder; None if the checkpoint had none."""
        return self._tokenizer

    @cached_property
    def _tokenizer(self) -> Tokenizer | None:
        path = self.bundle.path / "tokenizer.json"
        return Tokenizer.from_file(path) if path.is_file() else None


def load_engine(
    path: str | Path,
    *,
    checkpoint: str | Path | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> Engine:
    """Load the engine folder that `CompiledModel.save` wrote.

    checkpoint   where the weights are now, if their directory has moved since
    progress     called with (bytes done, bytes in all, tensor name) while weights are decoded

    Raises BundleError for a damaged folder, EngineMismatch for one that does not fit this machine, torch or
    checkpoint, CheckpointError for weights that cannot be read.
    """
    bundle = read_bundle(path, checkpoint=checkpoint)
    if list(bundle.parts) != [MAIN]:
        raise EngineMismatch(
            f"{path}: has parts {', '.join(bundle.parts)}, this version runs engines of one part, {MAIN}"
        )
    _check_logits(path, bundle)
    program = Program(bundle.parts[MAIN])
    model = load_checkpoint(bundle.checkpoint, bundle.numerics, progress=progress)
    weights = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return Engine(bundle, program.bind({name: tensor.detach() for name, tensor in weights.items()}))


def _check_logits(path: str | Path, bundle: Bundle) -> None:
    outputs, vocab = bundle.parts[MAIN].outputs, bundle.config.vocab_size
    if [(o.dtype, len(o.shape), o.shape[-1:]) for o in outputs] != [("float32", 2, [vocab])]:
        found = ", ".join(f"{o.dtype}[{', '.join(map(str, o.shape))}]" for o in outputs) or "nothing"
        raise EngineMismatch(
            f"{path}: part {MAIN} gives {found}, an engine gives logits float32[L, {vocab}]; compile the engine again"
        )
