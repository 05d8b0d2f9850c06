"""README.md is true: its commands and its Python example run as they stand, the folders that it names are there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
SHELL = [body for language, body in BLOCKS if language in {"sh", "bash", "shell"}]
PYTHON = [body for language, body in BLOCKS if language == "python"]


def run(command: list[str], folder: Path) -> None:
    path = os.pathsep.join((sysconfig.get_path("scripts"), os.environ["PATH"]))
    env = {**os.environ, "PATH": path}
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=env, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_first_two_blocks_set_up_and_run() -> None:
    main_job, tests = SHELL[:2]
    for block, extra, last in ((main_job, ".", ".venv/bin/precede demo"), (tests, "'.[test]'", ".venv/bin/pytest")):
        assert f".venv/bin/pip install -e {extra} 'torch==2.13.0'" in block
        assert block.strip().endswith(last)


def test_named_folders_exist() -> None:
    missing = [name for name in re.findall(r"^\| `([\w/]+)/` \|", TEXT, re.MULTILINE) if not (ROOT / name).is_dir()]
    assert missing == []


@pytest.mark.slow
def test_commands_and_example_run(tmp_path: Path) -> None:
    for block in SHELL[2:]:
        run(["bash", "-euo", "pipefail", "-c", block], tmp_path)
    for block in PYTHON:
        run([sys.executable, "-c", block], tmp_path)
