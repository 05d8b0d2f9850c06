"""The door: every public name of precede, loaded when it is first asked for.

`import precede` costs milliseconds and imports neither torch nor the compiler, so a process that only serves an engine
folder never loads `precede.passes`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from precede.compile import CompiledModel, compile_model
    from precede.model.batch import StepBatch, StepRequest
    from precede.model.config import ModelConfig
    from precede.model.errors import PrecedeError
    from precede.options import CompileOptions
    from precede.passes.manager import Pass
    from precede.runtime.engine import Engine, load_engine
    from precede.runtime.llm import LLM
    from precede.runtime.request import RequestOutput
    from precede.runtime.sampling import SamplingParams

    __version__: str

__all__ = [
    "LLM",
    "CompileOptions",
    "CompiledModel",
    "Engine",
    "ModelConfig",
    "Pass",
    "PrecedeError",
    "RequestOutput",
    "SamplingParams",
    "StepBatch",
    "StepRequest",
    "__version__",
    "compile_model",
    "load_engine",
]

_HOMES = {
    "LLM": "precede.runtime.llm",
    "CompileOptions": "precede.options",
    "CompiledModel": "precede.compile",
    "Engine": "precede.runtime.engine",
    "ModelConfig": "precede.model.config",
    "Pass": "precede.passes.manager",
    "PrecedeError": "precede.model.errors",
    "RequestOutput": "precede.runtime.request",
    "SamplingParams": "precede.runtime.sampling",
    "StepBatch": "precede.model.batch",
    "StepRequest": "precede.model.batch",
    "compile_model": "precede.compile",
    "load_engine": "precede.runtime.engine",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        value: Any = version("precede")
    elif name in _HOMES:
        value = getattr(import_module(_HOMES[name]), name)
    else:
        raise AttributeError(f"module 'precede' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
