"""One capture a config and preset for the whole session; tests that rewrite a graph take a copy."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from torch import nn

from precede.model.batch import StepBatch
from precede.model.cache import CacheLayout, Caches, allocate
from precede.model.config import ModelConfig
from precede.model.numerics import Numerics
from precede.model.transformer import Transformer
from precede.passes.capture import capture, flat_inputs
from precede.passes.graph import Graph
from precede.passes.manager import PassContext, run_passes
from precede.passes.pipeline import PIPELINE

from . import toy


@dataclass(frozen=True)
class Captured:
    """A model, one step, and what capture made of them; `graph` and `clean` are copies at every read."""

    model: nn.Module
    batch: StepBatch
    caches: Caches
    raw: Graph
    config: ModelConfig
    numerics: Numerics

    @property
    def graph(self) -> Graph:
        return self.raw.copy()

    def clean(self) -> Graph:
        graph = self.graph
        run_passes(graph, PIPELINE[:1], self.context())
        return graph

    def context(self) -> PassContext:
        return PassContext(config=self.config, numerics=self.numerics, example=self.inputs)

    def inputs(self, batch: StepBatch | None = None) -> Sequence[torch.Tensor]:
        return flat_inputs(self.model, batch or self.batch, copy.deepcopy(self.caches))


@pytest.fixture(scope="session")
def tiny() -> Captured:
    model, batch, caches = toy.make()
    return Captured(model, batch, caches, capture(model, batch, caches), toy.config(), Numerics.of("exact32"))


@pytest.fixture(scope="session")
def captured() -> Callable[[str, str], Captured]:
    """(config, preset) -> the real model on meta weights, captured."""

    @cache
    def of(name: str, preset: str) -> Captured:
        config, numerics = ModelConfig.preset(name), Numerics.of(preset)
        model = Transformer(config, numerics, device="meta").eval().requires_grad_(False)
        layout = CacheLayout.of(config, numerics)
        caches = allocate(layout, pages=8, rings=4, device="meta")
        batch = StepBatch.example(layout)
        return Captured(model, batch, caches, capture(model, batch, caches), config, numerics)

    return of
