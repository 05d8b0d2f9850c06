"""The door: names arrive when asked for, and asking for nothing costs nothing."""

import json
import subprocess
import sys

import pytest

import precede

CODE = """
import json, sys, time
begin = time.perf_counter()
{code}
seconds = time.perf_counter() - begin
print(json.dumps([seconds, sorted(sys.modules)]))
"""


def run(code: str) -> tuple[float, set[str]]:
    done = subprocess.run(
        [sys.executable, "-c", CODE.format(code=code)], capture_output=True, text=True, check=True, timeout=60
    )
    seconds, modules = json.loads(done.stdout.splitlines()[-1])
    return seconds, set(modules)


@pytest.mark.parametrize(
    "code",
    [
        "import precede; precede.__version__; dir(precede)",
        "import precede.model.config",
        "from precede import ModelConfig, PrecedeError, SamplingParams",
        "import precede.cli",
    ],
)
def test_light_imports_leave_torch_alone(code: str):
    seconds, modules = run(code)
    assert "torch" not in modules
    assert not any(m.startswith(("precede.passes", "precede.lowering")) for m in modules)
    assert seconds < 2.0  # 0.1 to 0.3 s on an idle core


def test_serving_imports_leave_the_compiler_alone():
    _, modules = run("from precede import load_engine, LLM, SamplingParams, StepBatch")
    assert "precede.runtime.engine" in modules
    assert not any(m.startswith("precede.passes") for m in modules)


@pytest.mark.parametrize("name", precede.__all__)
def test_every_public_name_resolves(name: str):
    assert getattr(precede, name) is not None
    assert name in dir(precede)


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'compile_modle'"):
        precede.compile_modle  # noqa: B018
