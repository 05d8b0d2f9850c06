"""The shape of the tree: listed packages are those on disk, imports keep their direction, all is described."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
STAGES = ("model", "passes", "lowering", "runtime")
DOOR = ROOT / "runtime" / "api"
MODULES = sorted(path for stage in STAGES for path in (ROOT / stage).rglob("*.py") if "__pycache__" not in path.parts)
MODEL_NEEDS = {"torch", "numpy", "safetensors", "tokenizers", "precede"}
MOST_LINES = 600


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def package_of(folder: Path) -> str:
    return "precede" if folder == DOOR else ".".join(("precede", *folder.relative_to(ROOT).parts))


def imported(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and full name of every absolute import; `from precede import passes` counts as precede.passes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names = [f".{alias.name}" for alias in node.names] if node.module == "precede" else [""]
            yield from ((node.lineno, node.module + name) for name in names)


def undescribed(body: list[ast.stmt], prefix: str = "") -> Iterator[str]:
    """Public classes, functions and methods without a docstring; what a private class holds is private."""
    for node in body:
        if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) or node.name.startswith("_"):
            continue
        decorators = {ast.unparse(decorator).rpartition(".")[2] for decorator in node.decorator_list}
        if not ast.get_docstring(node) and not decorators & {"overload", "setter", "override"}:
            yield f"{prefix}{node.name} (line {node.lineno})"
        if isinstance(node, ast.ClassDef):
            yield from undescribed(node.body, f"{prefix}{node.name}.")


def run(*command: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    words = [str(part) for part in command]
    return subprocess.run(words, capture_output=True, text=True, cwd=ROOT, env={**os.environ, **env}, check=False)


def test_every_package_on_disk_is_listed() -> None:
    on_disk = {package_of(path.parent) for path in MODULES}
    assert sorted(PROJECT["tool"]["setuptools"]["packages"]) == sorted(on_disk)
    assert [relative(f) for f in {path.parent for path in MODULES} if not (f / "__init__.py").is_file()] == []


def test_the_door_has_no_module_named_like_a_stage() -> None:
    assert {path.stem for path in DOOR.iterdir()} & set(STAGES) == set()


def test_root_holds_no_python() -> None:
    assert [path.name for path in ROOT.glob("*.py")] == []


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_module_is_described_and_short(path: Path) -> None:
    text = path.read_text()
    tree = ast.parse(text)
    assert ast.get_docstring(tree), f"{relative(path)} has no module docstring"
    assert list(undescribed(tree.body)) == []
    assert text.count("\n") <= MOST_LINES, f"{relative(path)} should be split: one idea a file"


def test_model_needs_only_its_own_libraries() -> None:
    allowed = MODEL_NEEDS | sys.stdlib_module_names
    found = [
        f"{relative(path)}:{line} imports {name}"
        for path in MODULES
        if path.is_relative_to(ROOT / "model")
        for line, name in imported(ast.parse(path.read_text()))
        if name.partition(".")[0] not in allowed
    ]
    assert found == []


def test_no_stage_imports_the_door() -> None:
    found = [
        f"{relative(path)}:{line} imports {name}"
        for path in MODULES
        if path.parent != DOOR
        for line, name in imported(ast.parse(path.read_text()))
        if name.partition(".")[0] == "precede" and name.removeprefix("precede.").partition(".")[0] not in STAGES
    ]
    assert found == []


@pytest.mark.parametrize("module", ["precede", "precede.model.config"])
def test_import_is_light(module: str) -> None:
    done = run(sys.executable, "-c", f"import sys, {module}; print('torch' in sys.modules)")
    assert (done.stdout.strip(), done.stderr) == ("False", "")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    pytest.importorskip("importlinter", reason="import rules are checked with the dev extra")
    done = run(sys.executable, ROOT / "tests" / "typed_tree.py", tmp_path / "typed")
    assert done.returncode == 0, done.stderr
    return tmp_path / "typed"


def lint_imports(tree: Path) -> subprocess.CompletedProcess[str]:
    program = "import sys; from importlinter.cli import lint_imports_command; sys.exit(lint_imports_command())"
    config = str(ROOT / "pyproject.toml")
    return run(sys.executable, "-c", program, config, "--no-cache", "--no-logo", PYTHONPATH=str(tree), COLUMNS="200")


@pytest.mark.slow
def test_link_tree_has_every_module_under_its_import_name(tree: Path) -> None:
    linked = {path.resolve() for path in tree.rglob("*.py")}
    assert linked == set(MODULES)
    assert not (tree / "precede" / "runtime" / "api").exists()


@pytest.mark.slow
def test_imports_keep_their_direction(tree: Path) -> None:
    done = lint_imports(tree)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "statement", "contract"),
    [
        ("model", "from precede.passes import planted", "runtime over lowering over passes over model"),
        ("passes", "from precede.lowering import planted", "runtime over lowering over passes over model"),
        ("lowering", "import precede.runtime.planted", "runtime over lowering over passes over model"),
        ("runtime", "def late():\n    import precede.passes.planted", "serving never loads the passes"),
        ("runtime", "from precede.lowering import planted", "runtime imports only what an engine folder needs"),
        ("runtime", "from precede.model import planted", "runtime imports only what an engine folder needs"),
    ],
)
def test_a_wrong_import_is_caught(tree: Path, place: str, statement: str, contract: str) -> None:
    for stage in STAGES:
        (tree / "precede" / stage / "planted.py").write_text("")
    (tree / "precede" / place / "planted.py").write_text(statement + "\n")
    done = lint_imports(tree)
    assert done.returncode == 1, done.stdout + done.stderr
    verdicts = [line for line in done.stdout.splitlines() if line.startswith(contract) and "BROKEN" in line]
    assert len(verdicts) == 1, done.stdout
    assert f"precede.{place}.planted" in done.stdout


@pytest.mark.slow
def test_serving_reaches_no_pass_through_lowering(tree: Path) -> None:
    (tree / "precede" / "passes" / "planted.py").write_text("")
    (tree / "precede" / "lowering" / "planted.py").write_text("import precede.passes.planted\n")
    (tree / "precede" / "runtime" / "planted.py").write_text("import precede.lowering.planted\n")
    done = lint_imports(tree)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "precede.lowering.planted -> precede.passes.planted" in done.stdout
