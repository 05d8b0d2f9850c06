"""Lay the packages out under their import names, as links, for tools that read the sources through the file system.

An editable install maps folders to packages by an import hook that pyright and import-linter cannot see. This script
makes `build/typed/precede/...` (or the folder given as its only argument): one real directory a package, one link a
file, exactly the packages that pyproject.toml lists, so that the door in runtime/api has one name and not two.
"""

from __future__ import annotations

import shutil
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def package_folders() -> dict[str, Path]:
    """Every package that pyproject.toml lists and the folder that holds its modules."""
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    mapped: dict[str, str] = setuptools["package-dir"]
    folders = {}
    for package in setuptools["packages"]:
        parent = package
        while parent not in mapped:
            parent = parent.rpartition(".")[0]
        below = package[len(parent) :].strip(".").split(".") if package != parent else []
        folders[package] = ROOT.joinpath(mapped[parent], *below)
    return folders


def make_tree(target: Path) -> None:
    """Replace `target` by a fresh link tree; raises FileExistsError if it holds anything else than such a tree."""
    if target.exists() and any(child.name != "precede" for child in target.iterdir()):
        raise FileExistsError(f"{target} holds files that this script did not make; name an empty folder")
    if target.exists():
        shutil.rmtree(target)
    for package, folder in package_folders().items():
        directory = target.joinpath(*package.split("."))
        directory.mkdir(parents=True, exist_ok=True)
        for file in folder.iterdir():
            if file.suffix in {".py", ".pyi"} or file.name == "py.typed":
                (directory / file.name).symlink_to(file)


if __name__ == "__main__":
    make_tree(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build" / "typed")
