import pytest
import torch

from precede.lowering.errors import BundleError
from precede.lowering.operators import operator_name, resolve_operator


@pytest.mark.parametrize(
    "op",
    [torch.ops.aten.add.Tensor, torch.ops.aten.sum.default, torch.ops.aten.__and__.Tensor, torch.ops.aten.add_.Tensor],
    ids=str,
)
def test_name_resolves_to_itself(op):
    name = operator_name(op)
    assert name is not None
    assert resolve_operator(name, "here") is op


def test_own_operators():
    assert resolve_operator("precede.linear.default", "here") is torch.ops.precede.linear.default


@pytest.mark.parametrize(
    "target",
    ["aten.nothing.default", "aten.add.nothing", "aten.add.name", "precede.add.Tensor", "aten.from_file.default"],
)
def test_unknown_or_refused(target):
    with pytest.raises(BundleError, match=f"here: no operator {target}"):
        resolve_operator(target, "here")


@pytest.mark.parametrize(
    "value", [torch.add, torch.ops.aten.add, len, torch.ops.quantized.add.default, "aten.add.Tensor"]
)
def test_no_name(value):
    assert operator_name(value) is None
