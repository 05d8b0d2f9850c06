"""The wheel: it holds exactly the modules and data of the tree, and works where only it and its dependencies are."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
STAGES = ("model", "passes", "lowering", "runtime")
NOT_SHIPPED = ("__pycache__", "*.pyc", "*.egg-info", ".*_cache")

pytestmark = pytest.mark.slow


@dataclass(frozen=True, kw_only=True)
class Installed:
    wheel: Path
    bin: Path
    site: Path
    elsewhere: Path

    def run(self, *command: str) -> str:
        """Run a program of the environment in an empty folder; its output, or a failed test with all it said."""
        env = {key: value for key, value in os.environ.items() if key not in {"PYTHONPATH", "VIRTUAL_ENV"}}
        words = [str(self.bin / command[0]), *command[1:]]
        done = subprocess.run(words, capture_output=True, text=True, cwd=self.elsewhere, env=env, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.strip()


def pip(*words: str | Path) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """A wheel built from a copy of the sources (a stale build/ would leak into it), in an environment of its own.

    The dependencies come from this environment through a .pth line; since .pth files of a folder added that way are not
    read, the editable install of this environment stays invisible there.
    """
    base = tmp_path_factory.mktemp("packaging")
    source = base / "source"
    for stage in STAGES:
        shutil.copytree(ROOT / stage, source / stage, ignore=shutil.ignore_patterns(*NOT_SHIPPED))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    pip("wheel", "--no-deps", "--wheel-dir", base / "wheel", source)
    (wheel,) = (base / "wheel").glob("*.whl")

    venv.create(base / "env", symlinks=True)
    paths = sysconfig.get_paths("venv", {"base": str(base / "env"), "platbase": str(base / "env")})
    site = Path(paths["purelib"])
    pip("--python", Path(paths["scripts"]) / "python", "install", "--no-deps", wheel)
    (site / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n{sysconfig.get_path('platlib')}\n")
    elsewhere = base / "elsewhere"
    elsewhere.mkdir()
    return Installed(wheel=wheel, bin=Path(paths["scripts"]), site=site, elsewhere=elsewhere)


def shipped_name(path: Path) -> str:
    parts = path.relative_to(ROOT).parts
    return "/".join(("precede", *(parts[2:] if parts[:2] == ("runtime", "api") else parts)))


def test_wheel_holds_every_file_of_the_stages_and_nothing_else(installed: Installed) -> None:
    on_disk = {
        shipped_name(path)
        for stage in STAGES
        for path in (ROOT / stage).rglob("*")
        if path.is_file() and not any(path.match(p) or p in path.parts for p in NOT_SHIPPED)
    }
    with zipfile.ZipFile(installed.wheel) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
        notices = [name for name in wheel.namelist() if name.endswith("/licenses/LICENSE")]
    assert names == on_disk
    assert len(notices) == 1


def test_everything_imports_from_the_wheel(installed: Installed) -> None:
    program = f"""
import importlib, pathlib, pkgutil, precede
names = [module.name for module in pkgutil.walk_packages(precede.__path__, "precede.")]
files = [importlib.import_module(name).__file__ for name in names if not name.endswith("__main__")]
print([file for file in files if not pathlib.Path(file).is_relative_to({str(installed.site)!r})], len(files) > 5)
"""
    assert installed.run("python", "-c", program) == "[] True"


def test_public_names_resolve(installed: Installed) -> None:
    program = "import precede as p; print([n for n in p.__all__ if getattr(p, n, None) is None], len(p.__all__) > 5)"
    assert installed.run("python", "-c", program) == "[] True"


@pytest.mark.parametrize("command", [("precede", "--version"), ("python", "-m", "precede", "--version")], ids=" ".join)
def test_command_line_runs(installed: Installed, command: tuple[str, ...]) -> None:
    version = installed.wheel.name.split("-")[1]
    assert version in installed.run(*command)
