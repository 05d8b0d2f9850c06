import copy
import dataclasses
import re
import sys
import weakref
from typing import Any

import pytest
import torch

from precede.lowering.errors import BundleError, EngineMismatch
from precede.lowering.part import PartSpec
from precede.model.batch import StepBatch
from precede.model.cache import Caches
from precede.runtime.program import Program

F32, I64 = "float32", "int64"


def ref(name: str) -> dict[str, str]:
    return {"ref": name}


def node(name: str, target: str, *args: Any, dtype: Any = F32, shape: Any = ("T", 4), **kwargs: Any) -> dict[str, Any]:
    shape = list(shape) if isinstance(shape, tuple) else shape
    return {"name": name, "target": target, "args": list(args), "kwargs": kwargs, "dtype": dtype, "shape": shape}


def size(name: str, target: str, *args: Any) -> dict[str, Any]:
    return node(name, target, *args, dtype="int", shape=None)


def part(*nodes: dict[str, Any], output: str = "out", shape: Any = ("T", 4), dtype: str = F32) -> dict[str, Any]:
    def entry(name: str, role: str, source: str, dtype: str, *shape: Any) -> dict[str, Any]:
        return {"name": name, "role": role, "source": source, "dtype": dtype, "shape": list(shape)}

    return {
        "schema": "precede.part/1",
        "name": "main",
        "symbols": {"T": [1, 8], "rings": [1, None]},
        "inputs": [
            entry("w", "weight", "embed.weight", F32, 10, 4),
            entry("cache.window.0", "cache", "cache.window.0", F32, "rings", 4),
            entry("ids", "batch", "batch.token_ids", I64, "T"),
            entry("pos", "batch", "batch.positions", I64, "T"),
        ],
        "nodes": list(nodes),
        "outputs": [{"name": output, "dtype": dtype, "shape": list(shape)}],
    }


ROWS = node("rows", "aten.embedding.default", ref("w"), ref("ids"))
OUT = node("out", "aten.relu.default", ref("rows"))
WEIGHT = torch.arange(40.0).view(10, 4) - 20


def batch_of(T: int, **changes: torch.Tensor) -> StepBatch:
    fields = {f.name: torch.zeros(1, dtype=torch.int64) for f in dataclasses.fields(StepBatch)}
    fields["token_ids"] = torch.arange(T) % 10
    fields["positions"] = torch.arange(T)
    return StepBatch(**{**fields, **changes})


def caches(rings: int = 2) -> Caches:
    return Caches(window=[torch.zeros(rings, 4)], latent=[], index_key=[], group=[])


def run(data: dict[str, Any], T: int = 3, stores: Caches | None = None) -> torch.Tensor:
    return Program.from_json(data)({"embed.weight": WEIGHT}, stores or caches(), batch_of(T))


def test_runs():
    assert torch.equal(run(part(ROWS, OUT)), WEIGHT[:3].relu())


def test_text_and_mapping_are_the_same():
    data = part(ROWS, OUT)
    text = PartSpec.parse(data).to_json()
    assert Program.from_json(text).source.text == Program.from_json(data).source.text


def test_sizes_and_constants():
    data = part(
        size("T", "aten.sym_size.int", ref("ids"), 0),
        size("n1", "sym.mul", ref("T"), 3),
        size("n2", "sym.add", ref("n1"), -1),
        size("n3", "sym.floordiv", ref("n2"), 2),
        size("n4", "sym.mod", ref("n3"), 3),
        size("n5", "sym.max", ref("n4"), ref("T")),
        size("n6", "sym.min", ref("n5"), 100),
        size("n7", "sym.sub", ref("n6"), ref("T")),
        size("n8", "sym.neg", ref("n7")),
        node(
            "full",
            "aten.full.default",
            [ref("n6"), ref("T")],
            {"float": "-inf"},
            dtype="float64",
            shape=("T", "T"),
        ),
        output="full",
        shape=("T", "T"),
        dtype="float64",
    )
    data["nodes"][-1]["kwargs"] = {"dtype": {"dtype": "float64"}, "device": {"device": "program"}}
    result = run(data, T=4)
    assert result.shape == (4, 4)
    assert result.dtype == torch.float64
    assert result.isneginf().all()


def test_several_results():
    data = part(
        ROWS,
        node("top", "aten.topk.default", ref("rows"), 2, dtype=[F32, I64], shape=[["T", 2], ["T", 2]]),
        node("ids2", "getitem", ref("top"), 1, dtype=I64, shape=("T", 2)),
        node("halves", "aten.split.Tensor", ref("rows"), 2, 1, dtype=[F32, F32], shape=[["T", 2], ["T", 2]]),
        node("right", "getitem", ref("halves"), 1, shape=("T", 2)),
        node("out", "aten.mul.Tensor", ref("ids2"), ref("right"), shape=("T", 2)),
        shape=("T", 2),
    )
    assert torch.equal(run(data), WEIGHT[:3].topk(2).indices * WEIGHT[:3, 2:])


def test_cache_is_written_in_place():
    write = node("write", "aten.index_copy_.default", ref("cache.window.0"), 0, ref("ids"), ref("rows"))
    stores = caches(rings=5)
    run(part(ROWS, {**write, "shape": ["rings", 4]}, OUT), stores=stores)
    assert torch.equal(stores.window[0][:3], WEIGHT[:3])
    assert not stores.window[0][3:].any()


def test_values_die_after_their_last_use(monkeypatch):
    chain = [node(f"v{i}", "aten.neg.default", ref(f"v{i - 1}" if i else "rows")) for i in range(20)]
    program = Program.from_json(part(ROWS, *chain, output="v19"))
    alive: list[weakref.ref[torch.Tensor]] = []
    most = 0

    def negate(x):
        nonlocal most
        result = x.neg()
        alive.append(weakref.ref(result))
        most = max(most, sum(r() is not None for r in alive))
        return result

    (name,) = [n for n, t in program.source.operators.items() if t == "aten.neg.default"]
    step = program.source.function({name: negate, "w0": WEIGHT, "device": torch.device("cpu")})
    assert torch.equal(step(caches(), batch_of(3)), WEIGHT[:3])
    assert most == 2


def test_unused_parts_of_results_are_not_kept():
    data = part(
        ROWS, node("top", "aten.topk.default", ref("rows"), 2, dtype=[F32, I64], shape=[["T", 2], ["T", 2]]), OUT
    )
    data["nodes"].insert(2, node("first", "getitem", ref("top"), 0, shape=("T", 2)))
    lines = Program.from_json(data).source.text.splitlines()
    assert [line for line in lines if "f1(" in line] == ["    f1(v2, 2)"]
    assert torch.equal(run(data), WEIGHT[:3].relu())


def test_no_text_of_the_file_in_the_source():
    names = ["rows", "embed", "token_ids_", "relu"]
    text = Program.from_json(part(ROWS, OUT)).source.text
    assert not any(name in text for name in names)


def test_strings_stay_data():
    evil = "floor'); __import__('os').abort(); ('"
    data = part(ROWS, node("out", "aten.div.Tensor_mode", ref("rows"), 2, rounding_mode=evil))
    program = Program.from_json(data)
    assert "import" not in program.source.text
    with pytest.raises(EngineMismatch, match="rounding_mode"):
        program({"embed.weight": WEIGHT}, caches(), batch_of(2))


def test_no_gradients():
    weight = WEIGHT.clone().requires_grad_()
    result = Program.from_json(part(ROWS, OUT))({"embed.weight": weight}, caches(), batch_of(2))
    assert not result.requires_grad
    result.add_(1)


def test_failing_node_is_named():
    data = part(ROWS, node("wrong", "aten.view.default", ref("rows"), [7, 7]), OUT)
    with pytest.raises(
        EngineMismatch, match=r"part main, node wrong = aten\.view\.default: shape '\[7, 7\]'"
    ) as caught:
        run(data)
    assert isinstance(caught.value.__cause__, RuntimeError)


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ([size("s", "sym.floordiv", 1, 0), OUT], "node s = sym.floordiv: "),
        ([node("s", "aten.zeros.default", [10**30]), OUT], "node s = aten.zeros.default: "),
        ([node("s", "aten.zeros.default", [2**60]), OUT], "node s = aten.zeros.default: "),
        ([node("s", "aten.unsqueeze.default", ref("rows"), 9), OUT], "node s = aten.unsqueeze.default: Dimension out"),
    ],
)
def test_what_torch_refuses_names_the_node(nodes, message):
    if nodes[0]["name"] == "s" and nodes[0]["dtype"] == "int":
        nodes = [nodes[0], node("z", "aten.zeros.default", [ref("s")]), *nodes[1:]]
    with pytest.raises(EngineMismatch, match=re.escape(message)) as caught:
        run(part(ROWS, *nodes))
    assert "\n" not in str(caught.value)


def test_results_are_those_declared():
    for shape, dtype in ((("T", 5), F32), ((4, 4), F32), (("T",), F32), (("T", 4), "bfloat16")):
        step = Program.from_json(part(ROWS, OUT, shape=shape, dtype=dtype)).bind({"embed.weight": WEIGHT})
        for _ in range(2):
            with pytest.raises(EngineMismatch, match=r"part main, output: out is float32\[3, 4\], the engine expects"):
                step(caches(), batch_of(3))


def test_output_sizes_must_be_measured():
    with pytest.raises(
        BundleError, match=r"output out: size 'Q' is no size of a batch or cache input; .*integers or T"
    ):
        Program.from_json(part(ROWS, OUT, shape=("Q", 4)))


@pytest.mark.parametrize("args", [(5, 0), (1.5, 0), (ref("rows"), 2), (ref("rows"), -3), (ref("rows"), 10**30)])
def test_sizes_are_of_tensors(args):
    with pytest.raises(BundleError, match=r"node s = aten\.sym_size\.int: expected \(reference to a tensor, one of"):
        Program.from_json(part(ROWS, size("s", "aten.sym_size.int", *args), OUT))


FAULTS = [
    (
        "undefined",
        [ROWS, node("out", "aten.relu.default", ref("nothing"))],
        "node out = aten.relu.default: nothing is not",
    ),
    ("before definition", [OUT, ROWS], "rows is used before it is defined"),
    ("uses itself", [node("out", "aten.relu.default", ref("out"))], "out is used before it is defined"),
    ("duplicate", [ROWS, ROWS, OUT], "node rows = aten.embedding.default: the name is defined twice"),
    ("name of an input", [node("ids", "aten.relu.default", ref("w")), ROWS, OUT], "the name is defined twice"),
    ("unknown operator", [ROWS, node("out", "aten.zelu.default", ref("rows"))], "no operator aten.zelu.default"),
    ("unknown overload", [ROWS, node("out", "aten.relu.Tensor", ref("rows"))], "no operator aten.relu.Tensor"),
    ("file operator", [node("out", "aten.from_file.default", "/etc/passwd")], "no operator aten.from_file"),
    ("too few", [ROWS, node("out", "aten.add.Tensor", ref("rows"))], "argument other is missing; expected aten::add"),
    ("too many", [ROWS, node("out", "aten.relu.default", ref("rows"), 1)], "2 positional arguments; aten::relu"),
    ("unknown keyword", [ROWS, node("out", "aten.relu.default", ref("rows"), inplace=True)], "no argument 'inplace'"),
    ("given twice", [ROWS, node("out", "aten.relu.default", ref("rows"), self=ref("rows"))], "self is given twice"),
    ("text for a size", [ROWS, node("out", "aten.sum.dim_IntList", ref("rows"), ["1"])], "argument dim must be"),
    ("tensor for a size", [ROWS, node("out", "aten.unsqueeze.default", ref("rows"), ref("ids"))], "dim must be int"),
    ("size for a tensor list", [ROWS, node("out", "aten.cat.default", [1, 2])], "tensors must be List[Tensor]"),
    ("dtype for a flag", [ROWS, node("out", "aten.sum.dim_IntList", ref("rows"), [1], {"dtype": F32})], "keepdim"),
    ("list for a tensor", [ROWS, node("out", "aten.relu.default", [ref("rows")])], "self must be Tensor"),
    ("gives a number", [ROWS, node("out", "aten._local_scalar_dense.default", ref("rows"))], "holds tensors and sizes"),
    ("declared as a size", [ROWS, size("out", "aten.relu.default", ref("rows"))], "declare a size, the operator gives"),
    ("two results as one", [ROWS, node("out", "aten.topk.default", ref("rows"), 1)], "the operator gives 2 tensors"),
    ("part of a tensor", [ROWS, node("out", "getitem", ref("rows"), 0)], "expected (reference to several tensors"),
    ("float for arithmetic", [ROWS, OUT, size("n", "sym.add", 1, 1.5)], "expected 2 sizes"),
    ("tensor for arithmetic", [ROWS, OUT, size("n", "sym.add", 1, ref("rows"))], "expected 2 sizes"),
    ("one for two", [ROWS, OUT, size("n", "sym.add", 1)], "expected 2 sizes"),
    ("no output", [ROWS], "output out is not defined"),
    ("size as output", [size("out", "sym.add", 1, 2)], "output out is a size"),
    (
        "index too large",
        [
            ROWS,
            node("top", "aten.topk.default", ref("rows"), 2, dtype=[F32, I64], shape=[["T", 2], ["T", 2]]),
            node("out", "getitem", ref("top"), 2),
        ],
        "index 2 is outside the 2 results of top",
    ),
    (
        "shapes missing",
        [ROWS, node("top", "aten.topk.default", ref("rows"), 2, dtype=[F32, I64], shape=("T", 2))],
        "shape must be a list of as many shapes",
    ),
]


@pytest.mark.parametrize(("nodes", "message"), [f[1:] for f in FAULTS], ids=[f[0] for f in FAULTS])
def test_refuses_nodes(nodes, message):
    with pytest.raises(BundleError) as caught:
        Program.from_json(part(*nodes))
    assert message in str(caught.value)
    assert str(caught.value).startswith("part main, ") or "output" in message
    assert "\n" not in str(caught.value)


INPUT_FAULTS = [
    ({"source": "batch.file_name"}, "expected batch.FIELD"),
    ({"source": "batch.token_ids.data"}, "expected batch.FIELD"),
    ({"source": "batch.__class__"}, "expected batch.FIELD"),
    ({"source": "cache.window.0"}, "no batch source"),
    ({"role": "cache", "source": "cache.__dict__.0"}, "expected cache.STORE.INDEX"),
    ({"role": "cache", "source": "cache.window.-1"}, "expected cache.STORE.INDEX"),
    ({"role": "weight", "source": "batch.positions"}, "expected the name of a parameter"),
    ({"shape": ["Q"]}, "size 'Q' is not allowed here"),
    ({"role": "weight", "source": "b", "shape": ["T"]}, "expected integers"),
    ({"source": "batch.positions"}, "is already input"),
    ({"name": "pos"}, "two inputs have this name"),
]


@pytest.mark.parametrize(("change", "message"), INPUT_FAULTS, ids=[m for _, m in INPUT_FAULTS])
def test_refuses_inputs(change, message):
    data = copy.deepcopy(part(ROWS, OUT))
    data["inputs"][2].update(change)
    with pytest.raises(BundleError) as caught:
        Program.from_json(data)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({}, r"weight embed\.weight \(float32\[10, 4\]\) is missing from the loaded model"),
        ({"embed.weight": torch.ones(11, 4)}, r"is float32\[11, 4\], the engine expects float32\[10, 4\]"),
        ({"embed.weight": torch.ones(10, 4).bfloat16()}, r"is bfloat16\[10, 4\], the engine expects float32"),
    ],
)
def test_refuses_weights(weights, message):
    with pytest.raises(EngineMismatch, match=message):
        Program.from_json(part(ROWS, OUT)).bind(weights)


def bound(**options: Any):
    return Program.from_json(part(ROWS, OUT)).bind({"embed.weight": WEIGHT}, **options)


STEPS = [
    (caches(), batch_of(3, positions=torch.arange(4)), r"batch\.positions is int64\[4\].* int64\[T\], T = 3"),
    (caches(), batch_of(3, token_ids=torch.arange(3).int()), r"batch\.token_ids is int32\[3\]"),
    (caches(), batch_of(9), "T is 9, the engine was built for 1 to 8"),
    (Caches([torch.zeros(2, 5)], [], [], []), batch_of(3), r"float32\[2, 5\], the engine expects float32\[rings, 4\]"),
    (Caches([], [], [], []), batch_of(3), r"reads cache\.window\.0, but the caches have 0 stores window"),
]


@pytest.mark.parametrize(("stores", "batch", "message"), STEPS, ids=[m for _, _, m in STEPS])
def test_refuses_steps(stores, batch, message):
    with pytest.raises(EngineMismatch, match=message):
        bound()(stores, batch)


def test_when_steps_are_checked():
    good, bad = batch_of(3), batch_of(3, positions=torch.arange(3).int())
    for check, refuses in (("always", True), ("first", False), ("never", False)):
        step = bound(check=check)
        step(caches(), good)
        if refuses:
            with pytest.raises(EngineMismatch):
                step(caches(), bad)
        else:
            step(caches(), bad)
    with pytest.raises(EngineMismatch):
        bound(check="first")(caches(), bad)


def test_profile():
    step = Program.from_json(
        part(ROWS, node("r", "aten.relu.default", ref("rows")), node("out", "aten.relu.default", ref("r")))
    )
    profile = step.bind({"embed.weight": WEIGHT}).profile(caches(), batch_of(3))
    assert {t.target: t.calls for t in profile.targets} == {"aten.relu.default": 2, "aten.embedding.default": 1}
    assert profile.aten_ops == 3
    assert 0 < profile.seconds < 1
    assert [t.seconds for t in profile.top(2)] == sorted((t.seconds for t in profile.targets), reverse=True)
    assert "3 ATen calls" in str(profile)


def test_a_node_costs_one_call():
    """The step does nothing in Python but call the operators, once each."""
    count = 500
    chain = [node(f"v{i}", "aten.relu.default", ref(f"v{i - 1}" if i else "rows")) for i in range(count)]
    step = Program.from_json(part(ROWS, *chain, output=f"v{count - 1}")).bind({"embed.weight": WEIGHT})
    stores, batch = caches(), batch_of(3)
    step(stores, batch)
    calls = 0

    def count_call(frame, event, arg):
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count_call)
    try:
        step(stores, batch)
    finally:
        sys.setprofile(None)
    assert count < calls < count + 50
