import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from precede.lowering.operators import resolve_operator
from precede.lowering.part import NodeSpec
from precede.runtime.program_calls import BINDINGS, quick_call

X, Y, B = torch.randn(3, 4), torch.randn(3, 4), torch.randn(2, 3, 4)
ARGUMENTS = {
    "aten.add.Tensor": [(X, Y), (X, 2), (X, 0.5)],
    "aten.amax.default": [(X, [-1], True), (X, [0])],
    "aten.bmm.default": [(B, B.mT)],
    "aten.cat.default": [([X, Y], 1)],
    "aten.clamp.default": [(X, 0), (X, None, 0.5), (X, -0.1, 0.1)],
    "aten.div.Tensor": [(X, Y), (X, 3)],
    "aten.exp.default": [(X,)],
    "aten.flatten.using_ints": [(B, 1), (B, 0, 1)],
    "aten.index_select.default": [(X, 1, torch.tensor([2, 0]))],
    "aten.matmul.default": [(X, Y.T), (B, X.T)],
    "aten.mean.dim": [(X, [-1], True), (X, [0])],
    "aten.mul.Tensor": [(X, Y), (X, -1.5)],
    "aten.neg.default": [(X,)],
    "aten.reshape.default": [(X, [2, -1])],
    "aten.rsqrt.default": [(X.abs(),)],
    "aten.select.int": [(X, 1, 0)],
    "aten.sigmoid.default": [(X,)],
    "aten.softmax.int": [(X, -1)],
    "aten.square.default": [(X,)],
    "aten.stack.default": [([X, Y], -1)],
    "aten.sub.Tensor": [(X, Y), (X, 2)],
    "aten.sum.dim_IntList": [(X, [1], True), (X, [0])],
    "aten.transpose.int": [(X, 0, 1)],
    "aten.unsqueeze.default": [(X, 1)],
    "aten.where.ScalarOther": [(X > 0, X, -1), (X > 0, X, float("-inf"))],
    "aten.where.self": [(X > 0, X, Y)],
}


@pytest.mark.parametrize("target", BINDINGS)
def test_calls_exactly_the_operator(target):
    op = resolve_operator(target, "here")
    for arguments in ARGUMENTS[target]:
        traced = make_fx(lambda *a: BINDINGS[target](*a), pre_dispatch=True)(*arguments)
        (call,) = [n for n in traced.graph.nodes if n.op == "call_function"]
        assert call.target is op
        expected, found = op(*arguments), BINDINGS[target](*arguments)
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)


def make(target, *args, **kwargs):
    return NodeSpec(name="n", target=target, args=list(args), kwargs=kwargs, dtype="float32", shape=[1], stream=0)


X_REF = {"ref": "x"}


def test_only_plain_calls_are_quick():
    assert quick_call(make("aten.add.Tensor", X_REF, 1)) is torch.add
    assert quick_call(make("aten.cat.default", [X_REF, X_REF], 1)) is torch.cat
    assert quick_call(make("aten.add.Tensor", 1, X_REF)) is None
    assert quick_call(make("aten.add.Tensor", X_REF, X_REF, alpha=2)) is None
    assert quick_call(make("aten.cat.default", [1, X_REF])) is None
    assert quick_call(make("aten.relu.default", X_REF)) is None
    assert quick_call(make("aten.add.Tensor")) is None
