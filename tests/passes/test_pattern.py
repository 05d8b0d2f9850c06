"""Patterns: holes, sizes, commuting, leaks, and misses that read well."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from precede.passes.canonicalize import simplify
from precede.passes.errors import PatternError
from precede.passes.graph import Graph
from precede.passes.names import name_values
from precede.passes.pattern import Found, Pattern, TensorSpec

from .graphs import graph_of

aten = torch.ops.aten


def norm(x: torch.Tensor, w: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * w


NORM = Pattern(
    norm,
    tensors={"x": TensorSpec(shape=(0, 8)), "w": TensorSpec(shape=(8,))},
    scalars={"eps": (1e-5, 1e-6)},
    dynamic={"x": {0: "T"}},
)


def clean(graph: Graph) -> Graph:
    simplify(graph.fx)
    name_values(graph.fx)
    return graph


def find(pattern: Pattern, function: Callable[..., torch.Tensor], **inputs: tuple) -> Found:
    return pattern.find(clean(graph_of(function, named=False, **inputs)))


def test_finds_every_occurrence_with_its_own_scalar() -> None:
    found = find(NORM, lambda x, a, b: norm(norm(x, a, 1e-3), b, 1e-4), x=("T", 8), a=(8,), b=(8,))
    assert [m["eps"] for m in found.matches] == [1e-3, 1e-4]
    assert [m["w"].meta["source"] for m in found.matches] == ["a", "b"]
    assert found.matches[1]["x"] is found.matches[0].outputs[0]
    assert found.misses == ()


def test_static_sizes_fit_dynamic_ones() -> None:
    assert len(find(NORM, lambda x, a: norm(x, a, 1e-3), x=(5, 8), a=(8,)).matches) == 1


def test_sums_and_products_commute() -> None:
    def swapped(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return w * (torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-3) * x)

    assert len(find(NORM, swapped, x=("T", 8), w=(8,)).matches) == 1


def other_op(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.abs().mean(-1, keepdim=True) + 1e-3) * w


def other_axis(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(0, keepdim=True) + 1e-3) * w


def tensor_for_scalar(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + w[0]) * w


def other_value(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x.exp() * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-3) * w


def other_user(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-3) + w


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (other_op, "at square: want aten.square.default, got aten.abs.default"),
        (other_axis, "at mean: want -1, got 0"),
        (tensor_for_scalar, "at add: want a number for eps, got %select"),
        (other_value, "at x: want %x, got %exp"),
        (other_user, "at mul: want aten.mul.Tensor, got aten.add.Tensor"),
    ],
)
def test_near_misses_say_why(function: Callable[..., torch.Tensor], reason: str) -> None:
    found = find(NORM, function, x=("T", 8), w=(8,))
    assert found.matches == ()
    assert found.misses[0].reason == reason


def test_other_dtype_and_other_width() -> None:
    other = find(NORM, lambda x, w: norm(x, w, 1e-3), x=("T", 8, torch.bfloat16), w=(8, torch.bfloat16))
    assert other.misses[0].reason == "at x: want f32[T,8], got bf16[T,8]"
    wide = find(NORM, lambda x, w: norm(x, w, 1e-3), x=("T", 16), w=(16,))
    assert wide.misses[0].reason == "at x: want f32[T,8], got f32[T,16]"


def test_a_leak_is_a_miss_that_names_the_user() -> None:
    def leaky(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-3)
        return x * scale * w + scale.exp()

    found = find(NORM, leaky, x=("T", 8), w=(8,))
    assert found.matches == ()
    assert found.misses[0].reason == "at rsqrt: want no use outside the pattern, got used by %exp"


def test_nothing_there() -> None:
    found = find(NORM, lambda x: x.exp(), x=("T", 8))
    assert found.matches == ()
    assert "none in the graph" in found.misses[0].reason


def test_sizes_must_agree() -> None:
    def pair(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.cat((x.exp(), y.new_zeros(x.shape[0] * 2, 3)))

    pattern = Pattern(
        pair,
        tensors={"x": TensorSpec(shape=(0, 3)), "y": TensorSpec(shape=(0,))},
        dynamic={"x": {0: "A"}, "y": {0: "B"}},
    )
    assert len(find(pattern, pair, x=("T", 3), y=("K",)).matches) == 1
    other = find(pattern, lambda x, y: torch.cat((x.exp(), y.new_zeros(y.shape[0] * 2, 3))), x=("T", 3), y=("K",))
    assert other.misses[0].reason == "at new_zeros: want size 2*T, got 2*K"


def test_literals_that_follow_a_scalar_become_holes() -> None:
    def best(x: torch.Tensor, k: int) -> torch.Tensor:
        return torch.topk(torch.nn.functional.pad(x, (0, 2 * k + 1)), k, dim=1).values

    pattern = Pattern(best, tensors={"x": TensorSpec(shape=(0, 40))}, scalars={"k": (2, 3)}, dynamic={"x": {0: "T"}})
    found = find(pattern, lambda x: best(x, 5), x=("T", 40))
    assert [m["k"] for m in found.matches] == [5]

    def unlike(x: torch.Tensor) -> torch.Tensor:
        return torch.topk(torch.nn.functional.pad(x, (0, 12)), 5, dim=1).values

    assert find(pattern, unlike, x=("T", 40)).misses[0].reason == "at pad: want 2 * k + 1, got 12"


def test_constants_and_casts_may_be_shared() -> None:
    def ranked(x: torch.Tensor) -> torch.Tensor:
        return x.to(torch.float64) + torch.arange(4)

    pattern = Pattern(ranked, tensors={"x": TensorSpec(shape=(0, 4))}, dynamic={"x": {0: "T"}})

    def twice(x: torch.Tensor) -> torch.Tensor:
        wide, index = x.to(torch.float64), torch.arange(4)
        return (wide + index).exp() * wide * index

    assert len(find(pattern, twice, x=("T", 4)).matches) == 1


def test_scalars_that_change_the_structure_are_refused() -> None:
    def power(x: torch.Tensor, n: int) -> torch.Tensor:
        for _ in range(n):
            x = x.sin()
        return x

    with pytest.raises(PatternError, match="pattern power: n = 2 and 3 give different ops"):
        Pattern(power, tensors={"x": TensorSpec(shape=(4,))}, scalars={"n": (2, 3)})


def test_a_scaled_summand_does_not_commute() -> None:
    def scaled(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.add(torch.sigmoid(x), y, alpha=2)

    pattern = Pattern(scaled, tensors={"x": TensorSpec(shape=(4,)), "y": TensorSpec(shape=(4,))})
    assert len(find(pattern, scaled, x=(4,), y=(4,)).matches) == 1
    assert find(pattern, lambda x, y: torch.add(y, torch.sigmoid(x), alpha=2), x=(4,), y=(4,)).matches == ()


def test_literals_that_bend_are_refused() -> None:
    def squared(x: torch.Tensor, k: int) -> torch.Tensor:
        return torch.sigmoid(x) * k + k * k

    def kinked(x: torch.Tensor, k: float) -> torch.Tensor:
        return x * (1.0 if k in (1.0, 2.0) else k)

    for function, scalars in ((squared, {"k": (2, 3)}), (kinked, {"k": (1.0, 2.0)})):
        with pytest.raises(PatternError, match=rf"pattern {function.__name__}: a literal is .*in a line"):
            Pattern(function, tensors={"x": TensorSpec(shape=(4,))}, scalars=scalars)


def test_a_match_around_a_write_is_a_miss() -> None:
    def pair(c: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(c) + 1.0

    def torn(c: torch.Tensor) -> torch.Tensor:
        before = torch.sigmoid(c)
        c.mul_(0.5)
        return before + 1.0

    def whole(c: torch.Tensor) -> torch.Tensor:
        before = torch.sigmoid(c) + 1.0
        c.mul_(0.5)
        return before - c

    pattern = Pattern(pair, tensors={"c": TensorSpec(shape=(4,))})
    assert len(find(pattern, whole, c=(4,)).matches) == 1
    found = find(pattern, torn, c=(4,))
    assert found.matches == ()
    assert found.misses[0].reason == (
        "at sigmoid: want no write between the pattern's ops to what it reads, got written by %mul"
    )


@pytest.mark.parametrize("function", [lambda x: x, lambda x: x[:]])
def test_a_pattern_without_ops_is_refused(function: Callable[..., torch.Tensor]) -> None:
    with pytest.raises(PatternError, match="has no op to look for"):
        Pattern(function, tensors={"x": TensorSpec(shape=(4,))})


@settings(max_examples=20, deadline=None)
@given(order=st.randoms(use_true_random=False))
def test_legal_reordering_and_commuting_change_nothing(order: random.Random) -> None:
    def function(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return norm(x, a, 1e-3) + norm(x.exp(), b, 1e-4)

    graph = clean(graph_of(function, named=False, x=("T", 8), a=(8,), b=(8,)))
    shuffle(graph, order)
    assert sorted(m["eps"] for m in NORM.find(graph).matches) == [1e-4, 1e-3]


def shuffle(graph: Graph, order: random.Random) -> None:
    """Another topological order, and swapped arguments of sums and products."""
    commute(graph, order)
    placed = set(graph.fx.find_nodes(op="placeholder"))
    pending, output = graph.call_nodes(), graph.fx.output_node()
    while pending:
        node = order.choice([n for n in pending if all(a in placed for a in n.all_input_nodes)])
        output.prepend(node)
        placed.add(node)
        pending.remove(node)
    graph.fx.lint()


def commute(graph: Graph, order: random.Random) -> None:
    """Swap the arguments of some sums and products."""
    for node in graph.call_nodes():
        swappable = node.target in (aten.add.Tensor, aten.mul.Tensor) and len(node.args) == 2 and not node.kwargs
        if swappable and isinstance(node.args[1], torch.fx.Node) and order.random() < 0.5:
            node.args = (node.args[1], node.args[0])
