"""What the commands print with: consoles, progress bars, one-line complaints."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

Advance = Callable[[int, int, str], None]
WIDTH_IN_A_FILE = 120


def console(*, stderr: bool = False) -> Console:
    """A console on stdout (results) or stderr (progress), without markup; 120 columns wide in a file or pipe."""
    from rich.console import Console

    file = sys.stderr if stderr else sys.stdout
    width = None if file.isatty() else WIDTH_IN_A_FILE
    return Console(file=file, width=width, highlight=False, markup=False, emoji=False)


def make_streams_safe() -> None:
    """Stand in for a closed stdout or stderr, and write what an encoding cannot hold as escapes instead of failing."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - it lives as long as we do
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


@contextmanager
def progress_bar(title: str) -> Iterator[Advance]:
    """A bar on stderr, moved by `advance(done, total, what)`; silent where stderr is no terminal."""
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[what]}", markup=False, style="dim"),
    )
    bars = console(stderr=True)
    with Progress(*columns, console=bars, disable=not bars.is_terminal) as progress:
        task = progress.add_task(title, total=None, what="")

        def advance(done: int, total: int, what: str) -> None:
            progress.update(task, completed=done, total=total, what=what)

        yield advance
        progress.update(task, what="")


def printable(text: str) -> str:
    """`text` with characters that could steer a terminal written as escapes; line breaks and tabs stay."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def complain(message: str, code: int) -> int:
    """Print one line on stderr; returns the exit code."""
    print("precede: " + printable(" ".join(message.split())), file=sys.stderr)
    return code
