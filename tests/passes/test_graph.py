"""Graph: accessors, effects through views, execution, copies, sizes."""

from __future__ import annotations

import operator

import pytest
import torch

from precede.passes.errors import GraphError
from precede.passes.graph import alias_roots, is_pure
from precede.passes.sizes import unify_sizes

from .conftest import Captured
from .graphs import graph_of

aten = torch.ops.aten


def test_effects_list_reads_and_writes_through_views(tiny: Captured) -> None:
    effects = tiny.graph.effects()
    assert [(a.op, a.writes) for a in effects["cache.window.1"]] == [
        ("index_select", False),
        ("precede.cache_write", True),
        ("precede.cache_write", True),
    ]
    assert list(effects) == [f"cache.window.{i}" for i in range(4)]


def test_a_cast_is_no_view_and_a_slice_is() -> None:
    graph = graph_of(lambda x: x[1:].to(torch.bfloat16) + 1, x=(4, 4))
    roots = alias_roots(graph.fx.nodes)
    x = graph.node("x")
    assert roots[graph.call_nodes(aten.slice.Tensor)[0]] == {x}
    assert roots[graph.call_nodes(aten.to.dtype)[0]].isdisjoint({x})


def test_parts_of_a_list_of_views_are_views() -> None:
    graph = graph_of(lambda x: x.chunk(2)[1].exp() + x.unbind(0)[0] + x.split([1, 3])[0], x=(4, 4))
    roots, x = alias_roots(graph.fx.nodes), graph.node("x")
    parts = graph.call_nodes(operator.getitem)
    assert len(parts) == 3
    assert all(roots[part] == {x} for part in parts)
    assert roots[graph.call_nodes(aten.exp.default)[0]].isdisjoint({x})


def test_unknown_value_names_its_neighbours(tiny: Captured) -> None:
    graph = tiny.clean()
    assert graph.node("L2.ffn.gate.softplus").target is aten.softplus.default
    with pytest.raises(GraphError, match=r"no value named %L2\.ffn\.gate\.softplos; near are %L2\.ffn\.gate\.softplus"):
        graph.node("L2.ffn.gate.softplos")


def test_run_refuses_a_wrong_number_of_inputs(tiny: Captured) -> None:
    with pytest.raises(GraphError, match=r"the graph has \d+ inputs .*, got 1"):
        tiny.graph.run(torch.zeros(1))


def test_copy_is_independent(tiny: Captured) -> None:
    graph = tiny.clean()
    other = graph.copy()
    text = graph.text()
    other.fx.erase_node(other.fx.output_node())
    assert graph.text() == text
    assert len(other.fx.nodes) == len(graph.fx.nodes) - 1


def test_sizes_hang_on_inputs_only() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        a = torch.cat((x, y)).exp()
        b = x.new_zeros(a.shape[0] * 2 + 1, x.shape[0] // 2)
        return b.sum() + a.new_ones(a.shape[0]).sum() + x.new_ones(x.shape[0] ** 2).sum()

    graph = graph_of(function, x=("T", 3), y=("K", 3))
    sizes = [n for n in graph.call_nodes() if isinstance(n.meta["val"], torch.SymInt)]
    assert {graph.describe(n.meta["val"]) for n in sizes} >= {"T", "K", "K+T", "(T//2)"}
    assert len({str(n.meta["val"].node.expr) for n in sizes}) == len(sizes)
    for node in sizes:
        assert all(a.op == "placeholder" or isinstance(a.meta["val"], torch.SymInt) for a in node.all_input_nodes)
    x, y = torch.randn(4, 3), torch.randn(5, 3)
    assert torch.equal(graph.run(x, y), function(x, y))
    count = len(graph.fx.nodes)
    unify_sizes(graph.fx)
    assert len(graph.fx.nodes) == count


def test_op_counts_leave_plumbing_out(tiny: Captured) -> None:
    counts = tiny.graph.op_counts()
    assert counts["precede.cache_write"] == 5
    assert counts["softplus"] == 4
    assert not any("getitem" in name or "sym_size" in name for name in counts)


def test_purity() -> None:
    graph = graph_of(lambda x: torch.rand_like(x) + x.clone().add_(1).topk(2).values.sum(), x=(4, 4))
    pure = {n.target: is_pure(n) for n in graph.call_nodes()}
    assert not pure[aten.rand_like.default]
    assert not pure[aten.add_.Tensor]
    assert pure[aten.topk.default]
    assert pure[operator.getitem]
