"""Options and fixtures that all tests share."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

# Before torch starts its pool: tests run in two processes, and so do the commands that they start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

from precede.compile import CompiledModel, compile_model
from precede.model.cache import CacheLayout
from precede.model.checkpoint import load_checkpoint
from precede.model.init import init_checkpoint
from precede.model.numerics import Numerics
from precede.model.transformer import Transformer
from precede.options import CompileOptions

from .golden_cases import find_cases

GOLDEN = Path(__file__).parent / "golden" / "data"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--golden-dir",
        action="append",
        type=Path,
        default=None,
        metavar="DIR",
        help="directory of golden cases (repeatable; default: tests/golden/data)",
    )


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)
    # torch logs every traced op for its own tools; pytest would collect and format each record.
    logging.getLogger("torch.__trace").propagate = False
    try:
        config.golden_cases = find_cases(config.getoption("--golden-dir") or [GOLDEN])  # type: ignore[attr-defined]
    except FileNotFoundError as error:
        raise pytest.UsageError(str(error)) from None


@pytest.fixture(scope="session")
def checkpoint_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A synthetic checkpoint directory of a preset (seed 0), made once; treat as read-only."""

    @cache
    def make(preset: str) -> Path:
        directory = tmp_path_factory.mktemp("checkpoints") / preset
        init_checkpoint(preset, directory, 0)
        return directory

    return make


@pytest.fixture(scope="session")
def model_of(checkpoint_of: Callable[[str], Path]) -> Callable[..., Transformer]:
    """That checkpoint loaded with a numerics preset or Numerics; shared, so treat as read-only but for the layout."""

    @cache
    def load(preset: str, numerics: str | Numerics) -> Transformer:
        return load_checkpoint(checkpoint_of(preset), numerics).requires_grad_(False)

    def get(preset: str, numerics: str | Numerics = "exact32") -> Transformer:
        model = load(preset, numerics)
        model.set_layout(CacheLayout.of(model.config, model.numerics))
        return model

    return get


@pytest.fixture(scope="session")
def compiled_of(checkpoint_of: Callable[[str], Path]) -> Callable[[str, str], CompiledModel]:
    """That checkpoint compiled with pages of 16 tokens, once for the session: captures are what costs time here."""

    @cache
    def compiled(preset: str, numerics: str) -> CompiledModel:
        return compile_model(checkpoint_of(preset), CompileOptions(numerics=numerics, page_size=16))

    return compiled
