"""The manager: records, expectations, options, and the numerics check."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from precede.passes.errors import PassError, VerifyError
from precede.passes.graph import Graph
from precede.passes.manager import PassContext, Tier, run_passes
from precede.passes.pattern import Miss
from precede.passes.pipeline import PIPELINE, STEPS
from precede.passes.verify import verify

from .conftest import Captured

aten = torch.ops.aten


class Swap:
    """Replaces one op by another everywhere: right or wrong, as the test wants."""

    name = "swap"
    numerics: Tier = "exact"

    def __init__(self, old: object, new: object, expected: int | None = None) -> None:
        self.old, self.new, self.expected = old, new, expected

    def expects(self, graph: Graph, context: PassContext) -> int | None:
        return self.expected

    def run(self, graph: Graph, context: PassContext) -> None:
        for node in graph.call_nodes(self.old):
            node.target = self.new
            context.count(1)
        context.miss(Miss(at="sqrt", want="aten.sqrt.default", got="aten.softmax.int", node="L7.ffn.gate.sqrt"))


class Careless(Swap):
    name = "careless"

    def run(self, graph: Graph, context: PassContext) -> None:
        graph.fx.erase_node(graph.call_nodes(torch.ops.precede.cache_write.default)[0])


def test_records_say_what_was_done(tiny: Captured) -> None:
    graph = tiny.graph
    records = run_passes(graph, PIPELINE, tiny.context())
    assert list(records) == [p.name for p in PIPELINE]
    record = records["mega_gate"]
    assert (record.matches, record.expected, record.numerics) == (4, 4, "exact")
    assert record.effects_kept
    assert record.nodes_after == len(graph.fx.nodes) < record.nodes_before
    assert record.ops_changed()["precede.mega_gate"] == 4
    assert record.after.text() == graph.text()
    assert "softplus" in record.before.text()
    assert "precede.mega_gate" in str(record.diff)
    data = record.json()
    assert data["matches"] == 4
    assert data["misses"] == []
    assert record.diff.json()["added"] == 4


def test_a_vanished_fusion_is_an_error_with_the_reason(tiny: Captured) -> None:
    pipeline = [PIPELINE[0], Swap(aten.sqrt.default, aten.abs.default, expected=40)]
    with pytest.raises(
        PassError, match=r"swap expected 40 matches and made 4; %L7\.ffn\.gate\.sqrt: at sqrt: want aten\.sqrt\.default"
    ):
        run_passes(tiny.graph, pipeline, tiny.context())
    records = run_passes(tiny.graph, pipeline, tiny.context(), allow_misses=True)
    assert records["swap"].json()["misses"][0]["node"] == "L7.ffn.gate.sqrt"


def test_disable_and_stop_after(tiny: Captured) -> None:
    records = run_passes(tiny.graph, PIPELINE, tiny.context(), disable=["mega_gate"])
    assert "mega_gate" not in records
    assert list(run_passes(tiny.graph, PIPELINE, tiny.context(), stop_after="canonicalize")) == ["canonicalize"]
    for options in ({"disable": ["mega_gat"]}, {"stop_after": "mega_gat"}):
        with pytest.raises(PassError, match=r"there is no pass 'mega_gat'; the passes are canonicalize, mega_gate"):
            run_passes(tiny.graph, PIPELINE, tiny.context(), **options)


def test_numerics_are_compared(tiny: Captured) -> None:
    run_passes(tiny.graph, PIPELINE, tiny.context(), verify_level="numerics")
    wrong = [PIPELINE[0], Swap(aten.sigmoid.default, aten.tanh.default)]
    with pytest.raises(PassError, match="swap promises equal bits"):
        run_passes(tiny.graph, wrong, tiny.context(), verify_level="numerics")
    run_passes(tiny.graph, wrong, tiny.context())
    context = tiny.context()
    context.example = None
    with pytest.raises(PassError, match="needs `example` inputs"):
        run_passes(tiny.graph, PIPELINE, context, verify_level="numerics")


def test_a_careless_pass_is_caught_unless_verifying_is_off(tiny: Captured) -> None:
    pipeline = [PIPELINE[0], Careless(None, None)]
    with pytest.raises(VerifyError, match="careless left an illegal graph"):
        run_passes(tiny.graph, pipeline, tiny.context())
    records = run_passes(tiny.graph, pipeline, tiny.context(), verify_level="off")
    assert not records["careless"].effects_kept


def test_the_pipeline_has_reasons() -> None:
    assert all(step.because for step in STEPS)
    assert len({step.rewriting.name for step in STEPS}) == len(STEPS)


@pytest.mark.parametrize("name", ["../escaped", "a/b", "", "Upper", "1st", "a-b", 5])
def test_a_pass_name_is_an_identifier(tiny: Captured, name: object) -> None:
    odd = Swap(None, None)
    odd.name = name  # type: ignore[assignment]
    with pytest.raises(PassError, match=r"a pass is named .*; a name is lower-case letters, digits and _"):
        run_passes(tiny.graph, [odd], tiny.context())


@pytest.mark.parametrize("missing", ["expects", "run", "numerics", "name"])
def test_a_pass_has_all_its_parts(tiny: Captured, missing: str) -> None:
    parts = {n: getattr(Swap(None, None), n) for n in ("name", "numerics", "expects", "run") if n != missing}
    with pytest.raises(PassError, match=rf"has no {missing}; a pass needs name, numerics"):
        run_passes(tiny.graph, [SimpleNamespace(**parts)], tiny.context())  # type: ignore[list-item]


def test_numerics_is_one_of_two(tiny: Captured) -> None:
    odd = Swap(None, None)
    odd.numerics = "fast"  # type: ignore[assignment]
    with pytest.raises(PassError, match=r"swap has numerics 'fast'; it is 'exact' or 'tolerance'"):
        run_passes(tiny.graph, [odd], tiny.context())


def test_values_have_names_without_canonicalize(tiny: Captured) -> None:
    for disable in (["canonicalize"], ["canonicalize", "mega_gate"]):
        graph = tiny.graph
        run_passes(graph, PIPELINE, tiny.context(), disable=disable)
        verify(graph, "nothing")
        assert torch.equal(graph.run(*tiny.inputs()), tiny.graph.run(*tiny.inputs()))
