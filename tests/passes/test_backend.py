"""The torch.compile door: the same Graph, the same matches, equal results."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from precede.passes.backend import precede_backend
from precede.passes.errors import CaptureError
from precede.passes.graph import Graph
from precede.passes.manager import PassRecord
from precede.passes.pipeline import PIPELINE

from . import toy
from .conftest import Captured


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def mark(batch: toy.StepBatch) -> toy.StepBatch:
    for field in ("token_ids", "positions", "request_of_row", "row_valid", "token_slot"):
        torch._dynamo.mark_dynamic(getattr(batch, field), 0)
    return batch


@pytest.mark.slow
def test_every_router_is_found_and_results_are_equal(tiny: Captured) -> None:
    seen: list[tuple[Graph, dict[str, PassRecord]]] = []
    backend = precede_backend(PIPELINE, tiny.context(), done=lambda g, r: seen.append((g, r)))
    compiled = torch.compile(tiny.model, backend=backend, fullgraph=True)
    ours, eager = toy.small_caches(4), toy.small_caches(4)
    batch = mark(toy.step(toy.layout()))
    with torch.no_grad():
        result, expected = compiled(batch, ours), tiny.model(batch, eager)
    assert torch.equal(result, expected)
    assert all(torch.equal(a, b) for a, b in zip(ours.window, eager.window, strict=True))
    graph, records = seen[0]
    assert records["mega_gate"].matches == 4
    assert records["mega_gate"].effects_kept
    gates = graph.call_nodes(torch.ops.precede.mega_gate.default)
    assert [n.meta["module"] for n in gates] == [f"layers.{i}.ffn.gate" for i in range(4)]
    assert [n.meta["layer"] for n in gates] == [0, 1, 2, 3]
    assert [n.meta["source"] for n in graph.placeholders("cache")] == [f"cache.window.{i}" for i in range(4)]
    assert graph.describe(graph.node("batch.token_ids").meta["val"]) == "i64[T]"
    roles = [n.meta["role"] for n in graph.placeholders()]
    assert roles == sorted(roles, key=["weight", "cache", "batch"].index)


def test_something_else_than_a_model_is_refused(tiny: Captured) -> None:
    class Other(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.exp()

    compiled = torch.compile(Other(), backend=precede_backend(PIPELINE, tiny.context()), fullgraph=True)
    with pytest.raises(Exception, match="only forward\\(batch, caches\\) of a model can be captured") as caught:
        compiled(torch.ones(3))
    assert isinstance(caught.value.__cause__ or caught.value, CaptureError) or "CaptureError" in str(caught.value)
