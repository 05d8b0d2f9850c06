"""Replacement: inherited names, chains of matches, order, types."""

from __future__ import annotations

import pytest
import torch

from precede.model.ops.kv import write
from precede.passes.errors import RewriteError
from precede.passes.graph import Graph
from precede.passes.pattern import Pattern, TensorSpec
from precede.passes.rewrite import Rewriter, sort_stably
from precede.passes.verify import verify

from .graphs import graph_of
from .test_pattern import NORM, clean, norm

aten = torch.ops.aten
X = {"x": TensorSpec(shape=(0, 8))}


def silu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(x)


SILU = Pattern(silu, tensors=X, dynamic={"x": {0: "T"}})


def fuse(graph: Graph, pattern: Pattern = SILU, target=aten.silu.default) -> int:
    rewriter = Rewriter(graph)
    matches = pattern.find(graph).matches
    for match in matches:
        rewriter.replace(match, target, [match["x"]])
    rewriter.finish()
    return len(matches)


def test_outputs_inherit_what_they_replace() -> None:
    graph = clean(graph_of(lambda x: silu(x).exp(), named=False, x=("T", 8)))
    old = graph.node("mul")
    old.meta.update(module="layers.3.ffn", layer=3, stack_trace="model.py:7 in forward", stream=1)
    assert fuse(graph) == 1
    new = graph.node("mul")
    assert new.target is aten.silu.default
    assert {k: new.meta[k] for k in ("module", "layer", "stack_trace", "stream")} == {
        "module": "layers.3.ffn",
        "layer": 3,
        "stack_trace": "model.py:7 in forward",
        "stream": 1,
    }
    assert graph.text().splitlines()[0] == "%mul:f32[T,8] = silu(%x)    @s1"
    verify(graph, "test")


def test_chained_matches_follow_the_new_values() -> None:
    graph = clean(graph_of(lambda x: silu(silu(silu(x))), named=False, x=("T", 8)))
    assert fuse(graph) == 3
    assert graph.op_counts() == {"silu": 3}
    x = torch.randn(3, 8)
    assert torch.allclose(graph.run(x), silu(silu(silu(x))))
    assert fuse(graph) == 0


def test_a_tuple_op_in_place_of_several_values() -> None:
    def split(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x[:, :4], x[:, 4:]

    pattern = Pattern(split, tensors=X, dynamic={"x": {0: "T"}})
    graph = clean(graph_of(lambda x: x[:, :4].exp() + x[:, 4:], named=False, x=("T", 8)))
    match = pattern.find(graph).matches[0]
    rewriter = Rewriter(graph)
    names = [o.meta["ssa"] for o in match.outputs]
    parts = rewriter.replace(match, aten.split.Tensor, [match["x"], 4, 1])
    rewriter.finish()
    assert [p.meta["ssa"] for p in parts] == names
    assert graph.text().splitlines()[0] == f"%{names[0]}:f32[T,4], %{names[1]}:f32[T,4] = split(%x, 4, 1)"
    verify(graph, "test")
    x = torch.randn(2, 8)
    assert torch.equal(graph.run(x), x[:, :4].exp() + x[:, 4:])


def test_another_type_is_refused() -> None:
    graph = clean(graph_of(lambda x: silu(x), named=False, x=("T", 8)))
    match = SILU.find(graph).matches[0]
    with pytest.raises(RewriteError, match=r"silu: the new op gives f32\[T,1\] for %mul, which is f32\[T,8\]"):
        Rewriter(graph).replace(match, aten.sum.dim_IntList, [match["x"], [1], True])


def test_an_output_used_before_the_match_is_complete() -> None:
    def both(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a = x.exp()
        return a, a + y

    pattern = Pattern(both, tensors={**X, "y": TensorSpec(shape=(0, 8))}, dynamic={"x": {0: "T"}, "y": {0: "T"}})

    def function(x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        a = x.exp()
        early = a.sin()
        return early + (a + z.cos())

    graph = clean(graph_of(function, named=False, x=("T", 8), z=("T", 8)))
    match = pattern.find(graph).matches[0]
    rewriter = Rewriter(graph)
    library = torch.library.Library("precede", "FRAGMENT")
    library.define("test_both(Tensor x, Tensor y) -> (Tensor, Tensor)")
    library.impl("test_both", both, "CompositeExplicitAutograd")
    rewriter.replace(match, torch.ops.precede.test_both.default, [match["x"], match["y"]])
    rewriter.finish()
    verify(graph, "test")
    x, z = torch.randn(2, 8), torch.randn(2, 8)
    assert torch.equal(graph.run(x, z), function(x, z))


def test_sorting_keeps_accesses_in_order() -> None:
    def function(pool: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        a = pool.flatten(0, 1).index_select(0, slots)
        write(pool, rows, slots)
        return a + pool.flatten(0, 1).index_select(0, slots)

    graph = clean(
        graph_of(function, named=False, caches=("pool",), pool=("P", 4, 8), rows=("T", 8), slots=("T", torch.int64))
    )
    first = graph.call_nodes(aten.index_select.default)[0]
    flat = first.args[0]
    first.append(flat)  # now the read stands before the view it needs
    sort_stably(graph)
    graph.fx.lint()
    kinds = [a.writes for a in graph.effects()["pool"]]
    assert kinds == [False, True, False]
    text = graph.text()
    sort_stably(graph)
    assert graph.text() == text


def test_norms_in_a_row() -> None:
    graph = clean(graph_of(lambda x, a: norm(norm(x, a, 1e-3), a, 1e-3), named=False, x=("T", 8), a=(8,)))
    rewriter = Rewriter(graph)
    for match in NORM.find(graph).matches:
        rewriter.replace(match, aten.rms_norm.default, [match["x"], [8], match["w"], match["eps"]])
    rewriter.finish()
    assert graph.op_counts() == {"rms_norm": 2}
    verify(graph, "test")
