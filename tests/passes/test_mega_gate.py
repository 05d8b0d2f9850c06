"""Mega-Gate: text, numbers, near misses."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import FileCheck

from precede.model.ops.select import best_indices
from precede.passes.capture import capture
from precede.passes.errors import PassError
from precede.passes.graph import Graph
from precede.passes.manager import run_passes
from precede.passes.mega_gate import router
from precede.passes.pipeline import PIPELINE

from . import toy
from .conftest import Captured


@pytest.fixture(scope="module")
def fused(tiny: Captured) -> Graph:
    graph = tiny.graph
    run_passes(graph, PIPELINE, tiny.context(), stop_after="mega_gate")
    return graph


def test_text(fused: Graph) -> None:
    text = fused.text()
    FileCheck().check_count("precede.mega_gate(", 4, exactly=True).check_not("softplus").run(text)
    FileCheck().check(
        "%L2.ffn.gate.mul:f32[T,2], %L2.ffn.gate.rsub_2:i64[T,2] = precede.mega_gate(%L2.sum_2, "
        "%layers.2.ffn.gate.weight, %layers.2.ffn.gate.bias, %layers.2.ffn.gate.bias_vl, %eq, 2, 1.5)"
    ).check_next("flatten(%L2.ffn.gate.rsub_2)").run(text)


def test_the_diff_folds_to_one_hunk(tiny: Captured) -> None:
    record = run_passes(tiny.graph, PIPELINE, tiny.context())["mega_gate"]
    assert [h.title() for h in record.diff.hunks] == ["layers 0-3 (4x)"]
    assert record.diff.removed == 4 * 26
    assert record.diff.added == 4


@settings(max_examples=8, deadline=None)
@given(rows=st.lists(st.integers(1, 9), min_size=1, max_size=2), seed=st.integers(0, 99))
def test_bits_are_those_of_eager(tiny: Captured, fused: Graph, rows: list[int], seed: int) -> None:
    batch = toy.step(toy.layout(), tuple(rows))
    batch.token_ids = torch.randint(0, 512, batch.token_ids.shape, generator=torch.Generator().manual_seed(seed))
    batch.token_ids[0] = 7  # an image row
    with torch.no_grad():
        expected = tiny.model(batch, toy.small_caches(4))
    assert torch.equal(fused.run(*tiny.inputs(batch)), expected)


class Softmax(toy.Gate):
    def forward(self, x: torch.Tensor, image: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = F.softmax(F.linear(x, self.weight), -1).sqrt()
        ids = best_indices(scores + torch.where(image.unsqueeze(1), self.bias_vl, self.bias), toy.TOPK)
        chosen = scores.gather(1, ids)
        return chosen / (chosen.sum(-1, keepdim=True) + 1e-20) * 1.5, ids


class Leaky(toy.Gate):
    def forward(self, x: torch.Tensor, image: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = F.softplus(F.linear(x, self.weight)).sqrt()
        ids = best_indices(scores + torch.where(image.unsqueeze(1), self.bias_vl, self.bias), toy.TOPK)
        chosen = scores.gather(1, ids)
        return chosen / (chosen.sum(-1, keepdim=True) + 1e-20) * 1.5 + 0 * scores.sum(), ids


class NoFloor(toy.Gate):
    def forward(self, x: torch.Tensor, image: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = F.softplus(F.linear(x, self.weight)).sqrt()
        ids = best_indices(scores + torch.where(image.unsqueeze(1), self.bias_vl, self.bias), toy.TOPK)
        chosen = scores.gather(1, ids)
        return chosen / (chosen.sum(-1, keepdim=True) + 1e-6) * 1.5, ids


@pytest.mark.parametrize(
    ("gate", "reason"),
    [
        (Softmax, "at softplus: want aten.softplus.default, got aten.softmax.int"),
        (Leaky, "at sqrt: want no use outside the pattern, got used by %L0.ffn.gate.sum_2"),
        (NoFloor, "at add: want 1e-20, got 1e-06"),
    ],
)
def test_near_misses(tiny: Captured, gate: type[torch.nn.Module], reason: str) -> None:
    model, batch, caches = toy.make(1, gate)
    graph = capture(model, batch, caches)
    run_passes(graph, PIPELINE[:1], tiny.context())
    found = router(tiny.context()).find(graph)
    assert found.matches == ()
    assert reason in [m.reason for m in found.misses]
    text = graph.text()
    with pytest.raises(PassError, match=r"mega_gate expected 4 matches and made 0; "):
        run_passes(graph, PIPELINE, tiny.context())
    assert graph.text() == text


def test_another_dtype_is_a_miss(tiny: Captured) -> None:
    context = tiny.context()
    context.numerics = type(context.numerics).of("native")
    found = router(context).find(tiny.clean())
    assert found.matches == ()


@pytest.mark.slow
def test_nano(captured: Callable[[str, str], Captured]) -> None:
    nano = captured("nano", "native")
    records = run_passes(nano.graph, PIPELINE, nano.context())
    assert records["mega_gate"].matches == 10
    assert records["mega_gate"].misses == ()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "preset"), [("nano", "exact32"), ("mini", "qat_bf16"), ("published", "native")])
def test_every_router_of_every_config(captured: Callable[[str, str], Captured], name: str, preset: str) -> None:
    of = captured(name, preset)
    record = run_passes(of.graph, PIPELINE, of.context())["mega_gate"]
    assert record.matches == record.expected == of.config.num_hidden_layers
    assert len(record.diff.hunks) <= 2  # layers with Engram share its view of the image mask
