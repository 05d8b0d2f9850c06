"""The printed form: names, tuple parts, sizes, hidden plumbing; snapshots do not move."""

from __future__ import annotations

import torch
from torch.testing import FileCheck

from precede.passes.names import name_values
from precede.passes.text import Snapshot

from .conftest import Captured
from .graphs import graph_of


def test_lines_read_as_documented(tiny: Captured) -> None:
    text = tiny.clean().text()
    FileCheck().check("%L3.ffn.gate.sum:f32[T,1] = sum(%L3.ffn.gate.gather, [-1], True)").check(
        "%L3.ffn.gate.add_3:f32[T,1] = add(%L3.ffn.gate.sum, 1e-20)"
    ).run(text)
    FileCheck().check("%L0.ffn.gate.topk.0:i64[T,2], _ = topk(%L0.ffn.gate.or, 2, 1)").run(text)
    FileCheck().check("precede.cache_write(%cache.window.0, %L0.store.proj.linear, %batch.token_slot)").check(
        "return %head.linear"
    ).run(text)
    assert "getitem" not in text
    assert "sym_size" not in text
    assert "device" not in text


def test_literals_and_streams() -> None:
    graph = graph_of(lambda x: x[1:].to(torch.bfloat16).reshape(x.shape[0] - 1, 2, 2), x=("T", 4))
    graph.call_nodes(torch.ops.aten.to.dtype)[0].meta["stream"] = 1
    lines = graph.text().splitlines()
    assert lines == [
        "%slice:f32[T-1,4] = slice(%x, 0, 1, end)",
        "%to:bf16[T-1,4] = to(%slice, bf16)    @s1",
        "%reshape:bf16[T-1,2,2] = reshape(%to, [T-1, 2, 2])",
        "return %reshape",
    ]


def test_a_snapshot_keeps_what_was() -> None:
    graph = graph_of(lambda x: x.exp().sin(), x=("T",))
    before = Snapshot.of(graph)
    sin = graph.node("sin")
    sin.replace_all_uses_with(graph.node("exp"))
    graph.fx.erase_node(sin)
    assert before.text().splitlines() == ["%exp:f32[T] = exp(%x)", "%sin:f32[T] = sin(%exp)", "return %sin"]
    assert graph.text().splitlines() == ["%exp:f32[T] = exp(%x)", "return %exp"]


def test_names_are_given_once_and_are_unique(tiny: Captured) -> None:
    graph = tiny.clean()
    names = [n.meta["ssa"] for n in graph.fx.nodes if n.op != "output"]
    assert len(names) == len(set(names))
    first = graph.node("L0.sum")
    graph.fx.erase_node(graph.fx.output_node())
    with graph.fx.inserting_after(first):
        new = graph.fx.call_function(torch.ops.aten.sum.default, (first,))
    new.meta.update(module="layers.0", val=first.meta["val"])
    name_values(graph.fx)
    assert [n.meta["ssa"] for n in graph.fx.nodes if n is not new] == names
    assert new.meta["ssa"] == "L0.sum_3"


def test_text_before_names_prints_the_names_that_will_be_given() -> None:
    graph = graph_of(lambda x: (x + 1) + (x + 2), named=False, x=("T",))
    text = graph.text()
    name_values(graph.fx)
    assert graph.text() == text
    assert "%add_3:f32[T] = add(%add, %add_2)" in text
