"""Capture: bits of eager, templates equal to the flat trace, refusals that say where."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn

from precede.model.batch import StepBatch, StepRequest
from precede.model.cache import CacheLayout, Caches, allocate
from precede.model.config import ModelConfig
from precede.model.transformer import Transformer
from precede.passes.capture import capture, flat_inputs, layer_of
from precede.passes.errors import CaptureError
from precede.passes.graph import Graph, written_args

from . import toy
from .conftest import Captured


def listing(graph: Graph) -> list[tuple[Any, ...]]:
    """A graph as plain data: targets, arguments by position, modules, layers, types."""
    position = {n: i for i, n in enumerate(graph.fx.nodes)}
    return [
        (
            n.op,
            n.meta["source"] if n.op == "placeholder" else n.target,
            str(fx.node.map_arg((n.args, n.kwargs), lambda x: f"n{position[x]}")),
            n.meta.get("module"),
            n.meta.get("layer"),
            graph.describe(n.meta.get("val")),
        )
        for n in graph.fx.nodes
    ]


@pytest.mark.parametrize("rows", [(5, 3), (1,), (2, 1), (8, 8)])
def test_runs_as_eager_bit_for_bit(tiny: Captured, rows: tuple[int, ...]) -> None:
    batch = toy.step(toy.layout(), rows)
    inputs = flat_inputs(tiny.model, batch, after := copy.deepcopy(tiny.caches))
    result = tiny.graph.run(*inputs)
    eager = copy.deepcopy(tiny.caches)
    with torch.no_grad():
        expected = tiny.model(batch, eager)
    assert torch.equal(result, expected)
    assert all(torch.equal(a, b) for a, b in zip(after.window, eager.window, strict=True))
    assert any(t.abs().sum() > 0 for t in after.window)


def test_templates_equal_the_flat_trace(tiny: Captured) -> None:
    flat = capture(tiny.model, tiny.batch, tiny.caches, templates=False)
    assert listing(tiny.graph) == listing(flat)


@pytest.mark.slow
def test_templates_equal_the_flat_trace_on_nano(captured: Callable[[str, str], Captured]) -> None:
    nano = captured("nano", "native")
    flat = capture(nano.model, nano.batch, nano.caches, templates=False)
    assert listing(nano.graph) == listing(flat)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 2, 7])
def test_nano_runs_as_eager_bit_for_bit(
    captured: Callable[[str, str], Captured], model_of: Callable[..., Transformer], rows: int
) -> None:
    model = model_of("nano", "native")
    layout = model.layout
    request = StepRequest(token_ids=[5 + i for i in range(rows)], pages=[1, 2], ring=1)
    batch = StepBatch.of([request], layout)
    caches = allocate(layout, pages=4, rings=3)
    eager = copy.deepcopy(caches)
    result = captured("nano", "native").graph.run(*flat_inputs(model, batch, caches))
    with torch.no_grad():
        expected = model(batch, eager)
    assert torch.equal(result, expected)
    assert expected.isfinite().all()
    for name in ("window", "latent", "index_key", "group"):
        assert all(torch.equal(a, b) for a, b in zip(getattr(caches, name), getattr(eager, name), strict=True))


def test_inputs_come_by_role_with_symbolic_sizes(tiny: Captured) -> None:
    graph = tiny.graph
    roles = [n.meta["role"] for n in graph.placeholders()]
    assert roles == sorted(roles, key=["weight", "cache", "batch"].index)
    assert [n.meta["source"] for n in graph.placeholders("cache")] == [f"cache.window.{i}" for i in range(4)]
    shapes = {n.meta["source"]: graph.describe(n.meta["val"]) for n in graph.placeholders()}
    assert shapes["batch.token_ids"] == "i64[T]"
    assert shapes["batch.page_table"] == "i64[R,P]"
    assert shapes["batch.kept_rows"] == "i64[K]"
    assert shapes["cache.window.2"] == "f32[rings,8,64]"
    assert graph.describe(graph.output().meta["val"]) == "f32[L,48]"


def test_copies_get_their_own_module_layer_and_weights(tiny: Captured) -> None:
    graph = tiny.graph
    linears = [n for n in graph.call_nodes(torch.ops.aten.linear.default) if n.meta["module"].endswith("gate")]
    assert [n.meta["module"] for n in linears] == [f"layers.{i}.ffn.gate" for i in range(4)]
    assert [n.meta["layer"] for n in linears] == [0, 1, 2, 3]
    assert all("linear.py" in n.meta["stack_trace"] and n.meta["stack_trace"].endswith("in product") for n in linears)
    writes = [n for n in graph.call_nodes() if written_args(n)]
    assert [w.args[0].meta["source"] for w in writes] == [f"cache.window.{i}" for i in (0, 1, 1, 2, 3)]


def test_capture_leaves_the_model_as_it_was(tiny: Captured) -> None:
    assert not any("forward" in m.__dict__ for m in tiny.model.modules())
    with torch.no_grad():
        assert tiny.model(tiny.batch, copy.deepcopy(tiny.caches)).isfinite().all()


def test_weights_and_buffers_are_not_read() -> None:
    model, batch, caches = toy.make(2)
    model = model.to("meta")
    model.register_buffer("table", torch.empty(10**9, 32, dtype=torch.float8_e4m3fn, device="meta"))
    graph = capture(model, batch, caches)
    assert graph.describe(graph.node("table").meta["val"]) == "f8e4m3[1000000000,32]"


def test_shared_parameters_are_one_input() -> None:
    model, batch, caches = toy.make(2)
    model.layers[1].ffn.experts = model.layers[0].ffn.experts
    graph = capture(model, batch, caches)
    assert "layers.1.ffn.experts" not in [n.meta["source"] for n in graph.placeholders()]
    after = copy.deepcopy(caches)
    with torch.no_grad():
        assert torch.equal(graph.run(*flat_inputs(model, batch, after)), model(batch, copy.deepcopy(caches)))


def test_mismatching_rows_are_refused(tiny: Captured) -> None:
    batch = dataclasses.replace(tiny.batch, token_slot=tiny.batch.token_slot[:-1])
    with pytest.raises(CaptureError, match=r"batch\.token_slot has 7 rows in dimension 0, batch\.token_ids has 8"):
        capture(tiny.model, batch, tiny.caches)


def test_wrong_number_of_caches_is_refused() -> None:
    config = ModelConfig.preset("nano")
    layout = CacheLayout.of(config, "exact32")
    model = Transformer(config, "exact32", device="meta")
    caches = allocate(layout, pages=4, rings=2)
    caches.window.pop()
    with pytest.raises(CaptureError, match=r"caches\.window has 9 tensors, the model needs 10"):
        capture(model, StepBatch.example(layout), caches)


class _Bad(nn.Module):
    """A layer whose Python does what a graph cannot."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.loose = how, torch.ones(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "item" and x[0].item() > 3:
            return x + 1
        if self.how == "size" and x.shape[0] > 16:
            return x + 1
        if self.how == "nonzero":
            return x[x > 0]
        if self.how == "loose":
            return x + self.loose[0]
        return x


class _BadModel(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.inner = _Bad(how)

    def forward(self, batch: StepBatch, caches: Caches) -> torch.Tensor:
        return self.inner(batch.token_ids.float())


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("item", r"module inner cannot be captured \(.*test_capture\.py:\d+\).*is data"),
        ("nonzero", r"module inner cannot be captured \(.*test_capture\.py:\d+\).*is data"),
        ("size", r"depends on a symbolic size.*test_capture\.py:\d+"),
        ("loose", r"inner uses a tensor that is neither parameter nor buffer .*register_buffer"),
    ],
)
def test_python_that_a_graph_cannot_hold_is_refused(tiny: Captured, how: str, message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        capture(_BadModel(how), tiny.batch, Caches([], [], [], []))


class _Greedy(nn.Module):
    template_kind = "greedy"

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.seen[0]


class _GreedyModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.greedy = _Greedy()

    def forward(self, batch: StepBatch, caches: Caches) -> torch.Tensor:
        self.greedy.seen = [batch.positions * 2]
        return self.greedy(batch.token_ids)


def test_a_template_must_be_given_what_it_reads(tiny: Captured) -> None:
    with pytest.raises(CaptureError, match=r"greedy reads mul, which is neither its own parameter nor an argument"):
        capture(_GreedyModel(), tiny.batch, Caches([], [], [], []))


class _Tail(nn.Module):
    template_kind = "tail"

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.weight)[:, 1:]


class _Tails(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tails = nn.ModuleList([_Tail(), _Tail()])

    def forward(self, batch: StepBatch, caches: Caches) -> torch.Tensor:
        x = batch.token_ids.float().unsqueeze(-1).expand(-1, 64)
        parts = [tail(x) for tail in self.tails]
        return torch.cat([part.as_strided(part.shape, part.stride(), part.storage_offset()) for part in parts])


def test_a_copied_template_keeps_the_offset_of_its_result(tiny: Captured) -> None:
    model = _Tails()
    caches = Caches([], [], [], [])
    graph = capture(model, tiny.batch, caches)
    assert torch.equal(graph.run(*flat_inputs(model, tiny.batch, caches)), model(tiny.batch, caches))


def test_layer_of() -> None:
    assert layer_of("layers.3.ffn.gate") == 3
    assert layer_of("layers.12") == 12
    assert layer_of("head") is None
    assert layer_of("layers") is None


@pytest.mark.slow
def test_published_config_from_meta_weights(captured: Callable[[str, str], Captured]) -> None:
    graph = captured("published", "native").graph
    assert 15_000 < len(graph.fx.nodes) < 30_000
    gates = [n for n in graph.call_nodes(torch.ops.aten.softplus.default)]
    assert [n.meta["layer"] for n in gates] == list(range(40))
