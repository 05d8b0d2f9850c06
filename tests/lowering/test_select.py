import pytest

from precede.lowering.errors import BackendUnavailable
from precede.lowering.part import PartSpec
from precede.lowering.select import BACKENDS, choose_backend, reference_decisions
from precede.lowering.target import TARGETS


@pytest.mark.parametrize("target", TARGETS)
def test_auto_records_every_refusal(target):
    backend, (decision,) = choose_backend("auto", TARGETS[target])
    assert backend == decision.implementation == "reference"
    assert [r.implementation for r in decision.refused] == list(BACKENDS[:-1])
    assert all(r.reason for r in decision.refused)


def test_named_reference():
    backend, (decision,) = choose_backend("reference", TARGETS["sm_90"])
    assert (backend, decision.reason, decision.refused) == ("reference", "asked for by name", [])


def test_gpu_backend_on_cpu_names_the_target():
    with pytest.raises(BackendUnavailable, match=r"tensorrt is unavailable: .*the target is cpu; use backend auto"):
        choose_backend("tensorrt", TARGETS["cpu"])


@pytest.mark.parametrize("name", ["inductor", "program", "tensorrt"])
def test_named_backend_never_falls_back(name):
    with pytest.raises(BackendUnavailable, match=f"backend {name} is unavailable: .*; use backend auto or reference"):
        choose_backend(name, TARGETS["sm_90"])


def test_unknown_backend():
    with pytest.raises(BackendUnavailable, match="'onnx' is unknown; choose auto or one of tensorrt"):
        choose_backend("onnx", TARGETS["cpu"])


def test_one_decision_an_operator(part_data):
    decisions = reference_decisions(PartSpec.parse(part_data))
    assert [d.op for d in decisions] == ["aten.embedding.default", "aten.unsqueeze.default", "aten.mul.Tensor"]
    assert {d.implementation for d in decisions} == {"reference"}
