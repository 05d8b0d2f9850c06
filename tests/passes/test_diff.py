"""Folded diffs: one hunk for equal edits, ranges, relative layers, linear time."""

from __future__ import annotations

import time

import pytest

from precede.passes.diff import Diff, diff, ranges
from precede.passes.text import Line


def lines(*texts: str, layer: int | None = None) -> list[Line]:
    return [Line(layer, t) for t in texts]


def model(layers: int, middle: list[str]) -> list[Line]:
    found = lines("%embed = embedding()")
    for i in range(layers):
        body = [
            f"%L{i}.in = add(%L{i - 1}.out)" if i else "%L0.in = add(%embed)",
            *middle,
            f"%L{i}.out = mul(%L{i}.in)",
        ]
        found += [Line(i, t.replace("@", str(i))) for t in body]
    return [*found, Line(None, f"return %L{layers - 1}.out")]


def test_equal_edits_fold_with_a_range() -> None:
    result = diff(model(40, ["%L@.a = sin(%layers.@.w)"]), model(40, ["%L@.a = cos(%layers.@.w, %L@.in)"]))
    assert [h.title() for h in result.hunks] == ["layers 0 (1x)", "layers 1-39 (39x)"]
    assert result.hunks[1].lines == (
        "  %Li.in = add(%Li-1.out)",
        "- %Li.a = sin(%layers.i.w)",
        "+ %Li.a = cos(%layers.i.w, %Li.in)",
        "  %Li.out = mul(%Li.in)",
    )
    assert (result.removed, result.added) == (40, 40)


def test_nothing_changed() -> None:
    same = model(3, ["%L@.a = sin()"])
    assert diff(same, same) == Diff((), 0, 0)
    assert str(diff(same, same)) == ""


def test_repeated_and_moved_lines() -> None:
    result = diff(lines("a", "x", "b", "x", "c"), lines("a", "x", "c", "b"))
    assert (result.removed, result.added) == (2, 1)
    assert str(diff(lines("a"), [])) == "@@ model (1x) @@\n- a"
    assert str(diff([], lines("a"))) == "@@ model (1x) @@\n+ a"


def test_edits_of_neighbouring_layers_stay_apart() -> None:
    before = [Line(0, "%L0.a = f()"), Line(1, "%L1.a = f()")]
    after = [Line(0, "%L0.a = g()"), Line(1, "%L1.a = g()")]
    result = diff(before, after, context=0)
    assert [h.layers for h in result.hunks] == [(0, 1)]


def test_json_is_plain() -> None:
    data = diff(model(2, ["%L@.a = sin()"]), model(2, [])).json()
    assert data["removed"] == 2
    assert {h["title"] for h in data["hunks"]} == {"layers 0 (1x)", "layers 1 (1x)"}


@pytest.mark.parametrize(
    ("numbers", "text"), [([0, 1, 2, 3, 5], "0-3, 5"), ([7], "7"), ([2, 0], "0, 2"), ([], ""), ([1, 1, 2], "1-2")]
)
def test_ranges(numbers: list[int], text: str) -> None:
    assert ranges(numbers) == text


def test_forty_layers_take_less_than_two_seconds() -> None:
    body = [f"%L@.v{j} = op(%L@.v{j - 1})" for j in range(400)]
    before, after = model(40, body), model(40, [*body[:200], "%L@.fused = fused()", *body[230:]])
    start = time.process_time()
    result = diff(before, after)
    assert time.process_time() - start < 2
    assert [h.title() for h in result.hunks] == ["layers 0-39 (40x)"]
