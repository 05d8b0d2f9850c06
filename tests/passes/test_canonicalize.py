"""Clean-ups that keep every bit, and the ones that must not happen."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from precede.model.ops.kv import write
from precede.passes.canonicalize import simplify
from precede.passes.graph import Graph

from .graphs import graph_of

aten = torch.ops.aten


def cleaned(function: Callable[..., torch.Tensor], **inputs: tuple) -> Graph:
    graph = graph_of(function, named=False, **inputs)
    simplify(graph.fx)
    graph.fx.lint()
    return graph


def ops(graph: Graph) -> dict[str, int]:
    return dict(graph.op_counts())


def test_no_op_casts_views_and_copies_go() -> None:
    graph = cleaned(lambda x: x.float().contiguous().view(4, 8).clone().detach()[:].expand(4, 8).exp(), x=(4, 8))
    assert ops(graph) == {"exp": 1}


def test_real_casts_views_and_copies_stay() -> None:
    graph = cleaned(lambda x: x.bfloat16().float().t().contiguous()[1:].clone().exp(), x=(8, 8))
    assert ops(graph) == {"to": 2, "t": 1, "contiguous": 1, "slice": 1, "clone": 1, "exp": 1}


def test_adding_zero_stays() -> None:
    graph = cleaned(lambda x: x + 0.0, x=(3,))
    assert ops(graph) == {"add": 1}
    assert not torch.signbit(graph.run(torch.tensor([-0.0, 1.0, -1.0]))[0])


def test_equal_values_merge_and_unequal_literals_do_not() -> None:
    graph = cleaned(lambda x: x.exp() + x.exp() * 1 + x.sin() * 1.0 + x.sin() * 1.0, x=(3,))
    assert ops(graph)["exp"] == 1
    assert ops(graph)["sin"] == 1
    signed = cleaned(lambda x: (x + 0.0).exp() - (x + -0.0).exp(), x=(3,))
    assert ops(signed)["add"] == 2


def test_reads_do_not_merge_across_a_write() -> None:
    def function(pool: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        before = pool.flatten(0, 1).index_select(0, slots)
        again = pool.flatten(0, 1).index_select(0, slots)
        write(pool, rows, slots)
        after = pool.flatten(0, 1).index_select(0, slots)
        return before + again - after

    graph = cleaned(function, pool=("pages", 4, 8), rows=("T", 8), slots=("T", torch.int64), caches=("pool",))
    assert ops(graph)["index_select"] == 2
    pool, rows, slots = torch.zeros(3, 4, 8), torch.ones(2, 8), torch.tensor([5, 7])
    assert torch.equal(graph.run(pool, rows, slots), torch.full((2, 8), -1.0))


def test_a_copy_of_what_is_written_later_stays() -> None:
    def function(pool: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        before = pool.clone()
        write(pool, rows, slots)
        return before - pool

    graph = cleaned(function, pool=("pages", 4, 8), rows=("T", 8), slots=("T", torch.int64), caches=("pool",))
    assert ops(graph)["clone"] == 1
    assert graph.run(torch.zeros(2, 4, 8), torch.ones(1, 8), torch.tensor([5])).sum() == -8


def permuted(c: torch.Tensor) -> torch.Tensor:
    return torch.einsum("pij->pji", c)


def kept(c: torch.Tensor) -> torch.Tensor:
    return torch.dropout(c, 0.0, False)


def broadcast(c: torch.Tensor) -> torch.Tensor:
    return torch.broadcast_tensors(c.new_ones(4), c)[1]


@pytest.mark.parametrize("view", [permuted, kept, broadcast])
def test_an_op_that_may_give_a_view_without_saying_so(view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    def function(c: torch.Tensor) -> torch.Tensor:
        seen = view(c)
        before = seen.exp()
        c.mul_(0.5)
        return before - seen.exp()

    graph = cleaned(function, c=("pages", 4, 4))
    c = torch.randn(3, 4, 4)
    assert torch.equal(graph.run(c.clone()), function(c.clone()))
    assert ops(graph)["exp"] == 2
    assert [a.writes for a in graph.effects()["c"]][-3:] == [False, True, False]


@pytest.mark.parametrize("keyword", [True, False])
def test_an_asked_for_copy_of_what_is_written_later_stays(keyword: bool) -> None:
    def function(c: torch.Tensor) -> torch.Tensor:
        before = c.to("cpu", torch.float32, copy=True) if keyword else c.to("cpu", torch.float32, False, True)
        c.mul_(0.5)
        return before - c

    graph = cleaned(function, c=("pages", 4))
    assert torch.equal(graph.run(torch.ones(3, 4)), torch.full((3, 4), 0.5))
    assert [a.writes for a in graph.effects()["c"]] == [False, True, False]


def test_buffers_written_in_place_stay_apart() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        a, b = torch.zeros(3), torch.zeros(3)
        a.add_(x)
        return a + b

    graph = cleaned(function, x=(3,))
    assert ops(graph)["zeros"] == 2
    assert torch.equal(graph.run(torch.ones(3)), torch.ones(3))


def test_dead_values_and_random_ones() -> None:
    graph = cleaned(lambda x: (x.exp(), x.sin() + 1, x.topk(2).values)[1], x=(3,))
    assert ops(graph) == {"sin": 1, "add": 1}
    noise = cleaned(lambda x: torch.rand_like(x) - torch.rand_like(x), x=(3,))
    assert ops(noise)["rand_like"] == 2


def test_layers_stay_apart() -> None:
    graph = graph_of(lambda x: x.exp() + x.exp(), named=False, x=(3,))
    for number, node in enumerate(graph.call_nodes(aten.exp.default)):
        node.meta["layer"] = number
    simplify(graph.fx)
    assert ops(graph)["exp"] == 2
    for node in graph.call_nodes(aten.exp.default):
        node.meta["layer"] = 0
    simplify(graph.fx)
    assert ops(graph)["exp"] == 1


def test_a_functional_collective_becomes_one_op() -> None:
    graph = graph_of(lambda x: x.exp().sin(), named=False, x=(3,))
    exp, sin = graph.call_nodes(aten.exp.default)[0], graph.call_nodes(aten.sin.default)[0]
    collectives = torch.ops._c10d_functional
    with graph.fx.inserting_before(sin):
        reduce = graph.fx.call_function(collectives.all_reduce.default, (exp, "sum", "0"))
        wait = graph.fx.call_function(collectives.wait_tensor.default, (reduce,))
    for node in (reduce, wait):
        node.meta = dict(exp.meta)
    sin.args = (wait,)
    simplify(graph.fx)
    assert ops(graph) == {"exp": 1, "precede.all_reduce": 1, "sin": 1}
    assert graph.call_nodes(torch.ops.precede.all_reduce.default)[0].args[1] == "tp"
