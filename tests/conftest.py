"""Options and fixtures that all tests share."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

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
    try:
        config.golden_cases = find_cases(config.getoption("--golden-dir") or [GOLDEN])  # type: ignore[attr-defined]
    except FileNotFoundError as error:
        raise pytest.UsageError(str(error)) from None
