import dataclasses
import operator

import pytest
import torch
from torch import fx

from precede.lowering.errors import BundleError
from precede.lowering.part import PartSpec
from precede.lowering.reference import serialise
from precede.model.batch import StepBatch
from precede.model.cache import Caches
from precede.passes import _torch
from precede.passes.graph import Graph
from precede.runtime.program import Program


def traced(function, *, T=3) -> Graph:
    """`function(weight[10, 4], ids[T], pos[T])` as a Graph, with T symbolic."""
    mode = _torch.fake_mode()
    rows = _torch.new_symbol(mode, "T", T)
    inputs = {
        ("weight", "embed.weight"): ([10, 4], torch.float32),
        ("batch", "batch.token_ids"): ([rows], torch.int64),
        ("batch", "batch.positions"): ([rows], torch.int64),
    }
    fakes = [_torch.empty_fake(mode, shape, None, dtype, "cpu") for shape, dtype in inputs.values()]
    with mode:
        graph = _torch.trace(function, fakes).graph
    for node, (role, source) in zip(graph.find_nodes(op="placeholder"), inputs, strict=True):
        node.meta.update(role=role, source=source)
    for node in graph.nodes:
        node.meta["ssa"] = node.name
    return Graph(graph, {_torch.expression(rows): "T"})


def batch_of(T: int) -> StepBatch:
    fields = {f.name: torch.zeros(1, dtype=torch.int64) for f in dataclasses.fields(StepBatch)}
    fields["token_ids"] = torch.randint(0, 10, (T,))
    fields["positions"] = torch.arange(T)
    return StepBatch(**fields)


def mixture(weight, ids, pos):
    x = torch.nn.functional.embedding(ids, weight) * 2.0 + pos[:, None].to(torch.float32)
    values, _ = torch.topk(x, 2)
    masked = torch.where(x > 1, x, torch.full_like(x, float("-inf")))
    padding = torch.ones(ids.shape[0] * 2 + 1, dtype=torch.float32, device=ids.device)
    picked = x[torch.arange(ids.shape[0], device=ids.device).flip(0)]
    halves = x.split(2, dim=-1)
    best = masked.amax(-1, keepdim=True).clamp(min=0.0)
    return x.softmax(-1) + values.sum(-1, keepdim=True) + padding.sum() + picked + best + torch.cat(halves[::-1], 1)


def test_saved_graph_computes_the_same():
    part = PartSpec.parse(serialise(traced(mixture)).to_json())
    weight = torch.randn(10, 4)
    step = Program(part).bind({"embed.weight": weight})
    for T in (1, 2, 7):
        batch = batch_of(T)
        expected = mixture(weight, batch.token_ids, batch.positions)
        assert torch.equal(step(Caches([], [], [], []), batch), expected)


def test_sizes_are_written_in_symbols():
    part = serialise(traced(mixture), ranges={"T": (1, 256)})
    assert part.symbols == {"T": (1, 256)}
    assert [i.shape for i in part.inputs] == [[10, 4], ["T"], ["T"]]
    assert part.outputs[0].shape == ["T", 4]
    assert ["2*T+1"] in [n.shape for n in part.nodes]
    sizes = [n for n in part.nodes if n.dtype == "int"]
    assert {n.target for n in sizes} == {"aten.sym_size.int", "sym.mul", "sym.add"}


def test_arguments_are_encoded():
    part = serialise(traced(mixture))
    values = [v for n in part.nodes for v in (*n.args, *n.kwargs.values())]
    for value in ({"float": "-inf"}, {"dtype": "float32"}, {"device": "program"}):
        assert value in values


def test_equal_graphs_give_equal_text():
    assert serialise(traced(mixture)).to_json() == serialise(traced(mixture)).to_json()


def _first_call(graph: Graph) -> fx.Node:
    return graph.call_nodes()[0]


def test_refuses_foreign_function():
    graph = traced(lambda w, i, p: w.relu())
    _first_call(graph).target = torch.relu
    with pytest.raises(BundleError, match=r"part main, node relu: target .* is no operator of aten, prims or precede"):
        serialise(graph)


@pytest.mark.parametrize("value", [torch.complex64, torch.device("cuda"), slice(1), 1j, torch.sparse_coo], ids=str)
def test_refuses_argument(value):
    graph = traced(lambda w, i, p: w.relu())
    node = _first_call(graph)
    node.kwargs = {"extra": value}
    with pytest.raises(BundleError, match="node relu"):
        serialise(graph)


def test_refuses_value_that_is_no_tensor():
    graph = traced(lambda w, i, p: w.relu())
    _first_call(graph).meta["val"] = "text"
    with pytest.raises(BundleError, match="value is a str"):
        serialise(graph)


def test_refuses_output_that_is_no_tensor():
    graph = traced(lambda w, i, p: w.relu())
    graph.fx.output_node().args = ((1,),)
    with pytest.raises(BundleError, match="output 1 is no tensor"):
        serialise(graph)


def test_getitem_is_plain():
    part = serialise(traced(lambda w, i, p: torch.topk(w, 2)[0]))
    assert [n.target for n in part.nodes][:2] == ["aten.topk.default", "getitem"]
    assert operator.getitem not in part.targets()
