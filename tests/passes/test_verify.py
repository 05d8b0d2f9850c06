"""The verifier: what lint does not see is named with pass and node."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from precede.passes.errors import VerifyError
from precede.passes.graph import Graph, erase_dead
from precede.passes.verify import State, verify

from .conftest import Captured
from .graphs import graph_of

aten = torch.ops.aten


def write_of(graph: Graph, layer: int) -> torch.fx.Node:
    return next(n for n in graph.call_nodes(torch.ops.precede.cache_write.default) if n.meta["layer"] == layer)


def move_read_behind_write(graph: Graph) -> None:
    read = graph.node("L0.store.index_select")
    write_of(graph, 0).append(read)


def drop_a_write(graph: Graph) -> None:
    graph.fx.erase_node(write_of(graph, 1))
    erase_dead(graph.fx)


def forget_type(graph: Graph) -> None:
    del graph.node("L1.sum").meta["val"]


def forget_name(graph: Graph) -> None:
    del graph.node("L1.sum").meta["ssa"]


def same_name_twice(graph: Graph) -> None:
    graph.node("L1.sum").meta["ssa"] = "L0.sum"


def unknown_op(graph: Graph) -> None:
    graph.node("L1.ffn.gate.sqrt").target = torch.sqrt


def dead_value(graph: Graph) -> None:
    node = graph.node("L1.sum")
    with graph.fx.inserting_after(node):
        new = graph.fx.call_function(aten.sin.default, (node,))
    new.meta.update(val=node.meta["val"], ssa="L1.sin")


def other_type(graph: Graph) -> None:
    node = graph.node("L1.sum")
    node.meta["val"] = graph.node("L1.ffn.gate.sqrt").meta["val"]


def other_result(graph: Graph) -> None:
    graph.fx.output_node().args = (graph.node("L1.sum"),)
    graph.fx.eliminate_dead_code()


def argument_before_its_maker(graph: Graph) -> None:
    graph.fx.output_node().prepend(graph.node("L1.sum"))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (move_read_behind_write, r"accesses to cache\.window\.0 .* were ordered rw, now wr"),
        (drop_a_write, r"accesses to cache\.window\.1 .* were ordered rww, now rw"),
        (forget_type, r"%L1\.sum: no type"),
        (forget_name, r"no name"),
        (same_name_twice, r"two values are named %L0\.sum"),
        (unknown_op, r"%L1\.ffn\.gate\.sqrt: unknown op"),
        (dead_value, r"%L1\.sin: unused and without effect"),
        (other_type, r"%L1\.sum: is f32\[T,8\], it was f32\[T,32\]"),
        (other_result, r"the result is f32\[T,32\], it was f32\[L,48\]"),
        (argument_before_its_maker, r"Argument 'sum_\d+'.* before"),
    ],
)
def test_damage_is_named(tiny: Captured, damage: Callable[[Graph], None], message: str) -> None:
    graph = tiny.clean()
    before = verify(graph, "nothing")
    damage(graph)
    with pytest.raises(VerifyError, match=f"careless left an illegal graph: .*{message}"):
        verify(graph, "careless", before)


def test_a_read_may_not_move_between_epochs_even_if_the_alternation_stays(tiny: Captured) -> None:
    graph = tiny.clean()
    read = graph.node("L1.store.index_select")
    first, second = [w for w in graph.call_nodes(torch.ops.precede.cache_write.default) if w.meta["layer"] == 1]
    with graph.fx.inserting_before(second):
        extra = graph.fx.node_copy(read)
    extra.meta["ssa"] = "extra"
    last = graph.fx.output_node()
    total = graph.node("head.linear")
    with graph.fx.inserting_before(last):
        use = graph.fx.call_function(aten.add.Tensor, (total, extra))
    use.meta.update(val=total.meta["val"], ssa="use", module="", layer=None)
    last.args = (use,)
    before = State.of(graph)
    assert before.alternation["cache.window.1"] == "rwrw"
    first.append(read)
    read.args, extra.args = extra.args, read.args
    first.prepend(extra)
    graph.node("L1.store.flatten")
    with pytest.raises(
        VerifyError, match=r"%(L1\.store\.index_select|extra) touched cache\.window\.1 after \d writes, now"
    ):
        verify(graph, "swap", before)


def test_a_read_may_not_move_behind_a_write_under_another_name() -> None:
    def function(c: torch.Tensor) -> torch.Tensor:
        first, moved = c.sin(), torch.sigmoid(c)
        c.mul_(0.5)
        return first + (moved + 1.0) + c.cos()

    graph = graph_of(function, c=(4,))
    before = State.of(graph)
    old = graph.node("add")
    with graph.fx.inserting_before(old):
        new = graph.fx.call_function(aten.sigmoid.default, (graph.node("c"),))
    new.meta = dict(old.meta)
    old.replace_all_uses_with(new)
    graph.fx.erase_node(old)
    erase_dead(graph.fx)
    assert State.of(graph).alternation == before.alternation
    with pytest.raises(VerifyError, match=r"%add touches c after 1 writes, in place of no access that was there"):
        verify(graph, "fuse", before)


def test_a_clean_graph_passes(tiny: Captured) -> None:
    graph = tiny.clean()
    state = verify(graph, "nothing")
    assert verify(graph, "nothing", state).alternation == state.alternation
