"""Compile options: checked once, kept in the manifest, refused where they could not be honoured."""

import json
from types import SimpleNamespace

import pytest

from precede.model.errors import PrecedeError
from precede.options import CompileOptions, OptionsError


class Extra:
    """The smallest thing that is a pass."""

    name = "mine"
    numerics = "exact"

    def expects(self, graph, context):
        return None

    def run(self, graph, context):
        return None


def named(name: str) -> Extra:
    extra = Extra()
    extra.name = name
    return extra


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"target": "sm_80"}, "target = 'sm_80'; choose one of host, cpu"),
        ({"backend": "onnx"}, "backend = 'onnx'; choose one of auto, reference"),
        ({"numerics": "fp8"}, "numerics 'fp8' is unknown; choose one of exact32, qat_bf16, native"),
        ({"numerics": ("float64", True, True)}, "neither a preset nor"),
        ({"numerics": 5}, "numerics = 5; it takes a preset's name"),
        ({"kv_format": "int4"}, "kv_format = 'int4'; choose one of auto, nvfp4, fp8, bf16"),
        ({"page_size": 0}, "page_size = 0; it takes an integer of at least 1"),
        ({"page_size": True}, "page_size = True; it takes an integer"),
        ({"page_size": "128"}, "page_size = '128'; it takes an integer"),
        ({"lookahead": -1}, "lookahead = -1; it takes an integer of at least 0"),
        ({"tensor_parallel": 2}, "tensor_parallel = 2 is not implemented"),
        ({"tensor_parallel": 0}, "tensor_parallel = 0; it takes an integer of at least 1"),
        ({"data_parallel": 2}, "data_parallel = 2 is not implemented"),
        ({"quantize": {"*": "nvfp4"}}, r"quantize = \{'\*': 'nvfp4'\} is not implemented"),
        ({"quantize": "nvfp4"}, "it takes a mapping"),
        ({"late_start": "cut+1"}, "late_start = 'cut\\+1' is not implemented"),
        ({"late_start": "20"}, "late_start = '20'; choose one of cut, cut\\+1"),
        ({"overlap_up_to": 32}, "overlap_up_to = 32 is not implemented"),
        ({"verify": "all"}, "verify = 'all'; choose one of off, structure, numerics"),
        ({"disable": "mega_gate"}, "disable = 'mega_gate'; it takes a collection"),
        ({"stop_after": 3}, "stop_after = 3; it takes the name of a pass"),
        ({"extra_passes": (SimpleNamespace(),)}, "has no name, expects"),
        ({"extra_passes": (SimpleNamespace(name="p", run=print),)}, "has no name, expects"),
        ({"extra_passes": (SimpleNamespace(name="p", run=print, expects=print),)}, "extra pass 'p' has no numerics"),
        ({"extra_passes": (Extra,)}, "has no name, expects"),
        ({"extra_passes": (named("../escaped"),)}, "a name that cannot name its files"),
        ({"extra_passes": (named("a/b"),)}, "a name that cannot name its files"),
        ({"extra_passes": (named(""),)}, "a name that cannot name its files"),
        ({"extra_passes": 5}, "extra_passes = 5; it takes a list of passes"),
        ({"disable": None}, "disable = None; it takes a collection"),
        ({"disable": [3]}, r"disable = \[3\]; it takes a collection"),
        ({"target": ["cpu"]}, r"target = \['cpu'\]; choose one of"),
        ({"page_size": -(10**5000)}, "page_size = a int that cannot be printed; it takes"),
        ({"allow_misses": 1}, "allow_misses = 1; it takes True or False"),
    ],
)
def test_wrong_values_are_refused_in_one_sentence(values, message):
    with pytest.raises(PrecedeError, match=message) as caught:
        CompileOptions(**values)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        CompileOptions(),
        CompileOptions(numerics=("bfloat16", True, False), disable={"b", "a"}, page_size=16, stop_after="canonicalize"),
    ],
)
def test_json_round_trip(options: CompileOptions):
    again = CompileOptions.from_json(json.loads(json.dumps(options.to_json())))
    assert again == options
    assert again.fingerprint() == options.fingerprint()


def test_fingerprint_sees_every_option_and_no_order():
    base = CompileOptions(disable=("a", "b")).fingerprint()
    assert CompileOptions(disable=["b", "a", "b"]).fingerprint() == base
    assert CompileOptions(disable=("a",)).fingerprint() != base
    assert CompileOptions(disable=("a", "b"), page_size=64).fingerprint() != base


def test_extra_passes_are_recorded_by_name_and_must_come_back():
    options = CompileOptions(extra_passes=(Extra(),))
    data = options.to_json()
    assert data["extra_passes"] == ["mine"]
    with pytest.raises(OptionsError, match=r"recorded with extra passes \['mine'\], given are \[\]"):
        CompileOptions.from_json(data)
    assert CompileOptions.from_json(data, extra_passes=[Extra()]).extra_passes[0].name == "mine"


def test_unknown_key_is_refused():
    with pytest.raises(OptionsError, match="unknown option 'pagesize'"):
        CompileOptions.from_json({"pagesize": 3})


def test_resolved_numerics():
    numerics = CompileOptions(numerics=("fp32", True, False)).resolved_numerics()
    assert (numerics.compute, numerics.kv_quant, numerics.act_quant) == ("float32", True, False)
