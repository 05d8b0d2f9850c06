import copy

import pytest

from precede.lowering.errors import BundleError
from precede.lowering.part import PartSpec, references


def test_text_round_trip(part_data):
    part = PartSpec.parse(part_data)
    assert PartSpec.parse(part.to_json()) == part
    assert part.symbols == {"T": (1, 64)}


def test_one_line_a_node(part_data):
    lines = PartSpec.parse(part_data).to_json().splitlines()
    assert sum('"target"' in line for line in lines) == 3


def test_targets_counts_operators_only(part_data):
    part_data["nodes"].append({**part_data["nodes"][0], "name": "again"})
    part_data["nodes"].append({**part_data["nodes"][0], "name": "n", "target": "sym.add", "args": [1, 2]})
    targets = PartSpec.parse(part_data).targets()
    assert targets == {"aten.embedding.default": 2, "aten.unsqueeze.default": 1, "aten.mul.Tensor": 1}


def test_references_in_order_and_nested():
    assert list(references([{"ref": "a"}, [{"ref": "b"}, 1, [{"ref": "a"}]], "c"])) == ["a", "b", "a"]


GOOD = [None, True, 1, 1.5, "text", [1, [2]], {"float": "-inf"}, {"dtype": "bfloat16"}, {"device": "program"}]


@pytest.mark.parametrize("value", GOOD, ids=str)
def test_accepts_argument(part_data, value):
    part_data["nodes"][0]["args"].append(value)
    assert PartSpec.parse(part_data).nodes[0].args[-1] == value


BAD = [
    ({"ref": 3}, "no JSON scalar"),
    ({"dtype": "complex64"}, "dtype 'complex64' is unknown; expected one of bool"),
    ({"device": "cuda:7"}, "device 'cuda:7' is unknown"),
    ({"float": "1e9"}, "float '1e9' is unknown"),
    ({"ref": "ids", "dtype": "int64"}, "no JSON scalar"),
    ({"__import__": "os"}, "no JSON scalar"),
    (float("nan"), 'must be written {"float": "nan"}'),
    ([[[[[[1]]]]]], "nested more than"),
]


@pytest.mark.parametrize(("value", "message"), BAD, ids=lambda v: str(v)[:30])
def test_refuses_argument(part_data, value, message):
    part_data["nodes"][0]["kwargs"]["extra"] = value
    with pytest.raises(BundleError, match="node rows, argument extra") as caught:
        PartSpec.parse(part_data, source="main.json")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "target", ["os.system", "aten.add", "builtins.eval.default", "sym.pow", "aten.add.Tensor;x", ""]
)
def test_refuses_target(part_data, target):
    part_data["nodes"][1]["target"] = target
    with pytest.raises(BundleError, match=r"nodes\[1\]|target"):
        PartSpec.parse(part_data)


def _set(path, value):
    def change(data):
        *parents, last = path
        for step in parents:
            data = data[step]
        data[last] = value

    return change


FAULTS = [
    (_set(["extra"], 1), "extra is not a key of this format"),
    (_set(["schema"], "precede.part/9"), "schema"),
    (_set(["nodes", 1, "name"], "a b"), "nodes[1] (a b).name"),
    (_set(["nodes", 1, "name"], "x\n__import__('os')"), "nodes[1]"),
    (_set(["nodes", 1, "stream"], -1), "nodes[1] (col).stream"),
    (_set(["nodes", 1, "args"], {"a": 1}), "nodes[1] (col).args"),
    (_set(["nodes", 1, "dtype"], "complex64"), "nodes[1] (col).dtype"),
    (_set(["inputs", 0, "role"], "file"), "inputs[0] (embed).role"),
    (_set(["inputs", 0, "dtype"], "quint8"), "inputs[0] (embed).dtype"),
    (_set(["inputs", 0, "shape"], [10, 4.0]), "inputs[0] (embed).shape"),
    (_set(["symbols"], {"T": [1]}), "symbols.T"),
    (lambda d: d.pop("outputs"), "outputs is missing"),
]


@pytest.mark.parametrize(("change", "message"), FAULTS, ids=[m for _, m in FAULTS])
def test_refuses_form(part_data, change, message):
    data = copy.deepcopy(part_data)
    change(data)
    with pytest.raises(BundleError) as caught:
        PartSpec.parse(data, source="main.json")
    assert str(caught.value).startswith("main.json: ")
    assert message in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "7", b"\xff\xfe", "[" * 100_000])
def test_refuses_text(text):
    with pytest.raises(BundleError, match=r"main.json"):
        PartSpec.parse(text, source="main.json")
