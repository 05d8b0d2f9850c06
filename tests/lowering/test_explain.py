from precede.lowering.explain import explain
from precede.lowering.part import PartSpec
from precede.lowering.select import choose_backend, reference_decisions
from precede.lowering.target import TARGETS


def test_text(part_data):
    _, chosen = choose_backend("auto", TARGETS["cpu"])
    assert explain([*chosen, *reference_decisions(PartSpec.parse(part_data))]).splitlines() == [
        "everything: reference, the first available backend for cpu",
        "  not tensorrt: tensorrt builds for GPUs, the target is cpu",
        "  not program: program builds for GPUs, the target is cpu",
        "  not inductor: this version of precede does not build Inductor packages",
        "part main, 3 operators (aten.embedding.default, aten.unsqueeze.default, aten.mul.Tensor): reference, "
        "the reference backend runs every operator as torch and this package define it",
    ]
