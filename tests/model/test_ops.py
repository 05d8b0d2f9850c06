"""Every op of the dialect: its fake predicts what its reference returns; the dispatcher runs the reference."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from precede.model.ops import OPS

LOCAL = [name for name in OPS if name != "all_reduce"]


@pytest.mark.parametrize("name", sorted(OPS))
def test_fake_matches_the_reference(name: str) -> None:
    op = OPS[name]
    args = op.inputs(torch.Generator().manual_seed(0))
    with FakeTensorMode() as mode:
        fakes = pytree.tree_map_only(torch.Tensor, mode.from_tensor, args)
        predicted = op.overload(*fakes)
    if name == "all_reduce":
        assert predicted.shape == args[0].shape
        return
    real = op.overload(*args)
    if real is None:
        assert predicted is None
        return
    for p, r in zip(pytree.tree_leaves(predicted), pytree.tree_leaves(real), strict=True):
        assert (p.shape, p.dtype) == (r.shape, r.dtype)


@pytest.mark.parametrize("name", LOCAL)
def test_dispatch_is_the_reference(name: str) -> None:
    op = OPS[name]
    ours = op.inputs(torch.Generator().manual_seed(1))
    theirs = op.inputs(torch.Generator().manual_seed(1))
    a, b = op.reference(*ours), op.overload(*theirs)
    for x, y in zip(pytree.tree_leaves((a, ours)), pytree.tree_leaves((b, theirs)), strict=True):
        if isinstance(x, torch.Tensor):
            bits = [t.view(torch.uint8) if t.dtype.itemsize == 1 else t for t in (x, y)]
            assert torch.equal(*bits)


def test_mutations_are_declared() -> None:
    writers = {n for n, op in OPS.items() if op.overload._schema.is_mutable}
    assert writers == {"cache_write"}
