"""Laws that every pass obeys, checked one pass at a time on the graph the passes before it leave."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from precede.passes.graph import Graph
from precede.passes.manager import Pass, run_passes
from precede.passes.pipeline import PIPELINE
from precede.passes.verify import State, effects_kept, verify

from .conftest import Captured
from .graphs import graph_of
from .test_pattern import commute

NAMES = [p.name for p in PIPELINE]


def upto(of: Captured, index: int) -> Graph:
    """The graph as pass number `index` meets it: a copy."""
    key = (id(of), index)
    if key not in _MET:
        graph = of.graph
        run_passes(graph, PIPELINE[:index], of.context())
        _MET[key] = graph
    return _MET[key].copy()


_MET: dict[tuple[int, int], Graph] = {}


each_pass = pytest.mark.parametrize("index", range(len(PIPELINE)), ids=NAMES)


def apply(rewriting: Pass, graph: Graph, of: Captured) -> int:
    context = of.context()
    rewriting.run(graph, context)
    return context.matches


@each_pass
def test_idempotent(tiny: Captured, index: int) -> None:
    graph = upto(tiny, index + 1)
    text = graph.text()
    assert apply(PIPELINE[index], graph, tiny) == 0
    assert graph.text() == text


@each_pass
def test_a_graph_without_the_pattern_is_returned_untouched(tiny: Captured, index: int) -> None:
    graph = graph_of(lambda x, w: (x @ w).relu().sum(-1), x=("T", 8), w=(8, 4))
    text = graph.text()
    assert apply(PIPELINE[index], graph, tiny) == 0
    assert graph.text() == text


@each_pass
def test_effects_names_and_types_are_kept(tiny: Captured, index: int) -> None:
    graph = upto(tiny, index)
    before = State.of(graph)
    apply(PIPELINE[index], graph, tiny)
    assert effects_kept(before, verify(graph, PIPELINE[index].name, before))


@each_pass
def test_bits_are_kept(tiny: Captured, index: int) -> None:
    graph = upto(tiny, index)
    before = graph.run(*tiny.inputs())
    apply(PIPELINE[index], graph, tiny)
    if PIPELINE[index].numerics == "exact":
        assert torch.equal(graph.run(*tiny.inputs()), before)


@each_pass
@settings(max_examples=6, deadline=None)
@given(order=st.randoms(use_true_random=False))
def test_legal_reordering_and_commuting_change_no_hits(tiny: Captured, index: int, order: random.Random) -> None:
    plain, mixed = upto(tiny, index), upto(tiny, index)
    commute(mixed, order)
    reorder(mixed, order)
    hits = apply(PIPELINE[index], plain, tiny)
    assert apply(PIPELINE[index], mixed, tiny) == hits
    verify(mixed, PIPELINE[index].name)


def reorder(graph: Graph, order: random.Random) -> None:
    """Another topological order in which accesses to each cache keep theirs."""
    earlier: dict[torch.fx.Node, set[torch.fx.Node]] = {n: set(n.all_input_nodes) for n in graph.fx.nodes}
    for accesses in graph.effects().values():
        for a, b in zip(accesses, accesses[1:], strict=False):
            earlier[b.node].add(a.node)
    placed = set(graph.fx.find_nodes(op="placeholder"))
    pending, output = graph.call_nodes(), graph.fx.output_node()
    while pending:
        near = pending[:40]
        node = order.choice([n for n in near if earlier[n] <= placed])
        output.prepend(node)
        placed.add(node)
        pending.remove(node)
    graph.fx.lint()


@pytest.mark.slow
@each_pass
@pytest.mark.parametrize(("name", "preset"), [("nano", "exact32"), ("nano", "native"), ("mini", "native")])
def test_real_models_obey_the_same_laws(
    captured: Callable[[str, str], Captured], name: str, preset: str, index: int
) -> None:
    of = captured(name, preset)
    test_idempotent(of, index)
    test_effects_names_and_types_are_kept(of, index)
