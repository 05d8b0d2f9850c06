"""The whole line in one command: checkpoint, passes, engine, a fresh process that serves it."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from precede.model.errors import PrecedeError
from precede.terminal import console, progress_bar

PRESET = "nano"
PROMPTS = ("The quick brown fox", "Compile precedes serve")
TOKENS = 16
STEPS = 5


class DemoError(PrecedeError):
    """A step of the demo that failed in its own process."""


def run_demo(folder: Path) -> None:
    """Make `folder`/checkpoint if it is absent, compile it to `folder`/engine, and generate from that elsewhere."""
    checkpoint, engine = folder / "checkpoint", folder / "engine"
    begin = time.perf_counter()
    folder.mkdir(parents=True, exist_ok=True)

    with _step(1, f"checkpoint {checkpoint}: preset {PRESET}, random weights in the published layout"):
        if checkpoint.exists():
            _say("found, kept")
        else:
            from precede.model.init import init_checkpoint

            with progress_bar("writing") as advance:
                init_checkpoint(PRESET, checkpoint, 0, progress=advance)

    with _step(2, "capture the eager model and run the passes"):
        from precede.compile import compile_model

        with progress_bar("compiling") as advance:
            compiled = compile_model(checkpoint, progress=advance)
        console().print(compiled.report())

    with _step(3, "what one pass changed, equal layers folded: mega_gate"):
        _say(compiled.diff("mega_gate"))

    with _step(4, f"engine {engine}"):
        compiled.save(engine)
        files = [file for file in engine.rglob("*") if file.is_file()]
        _say(f"{len(files)} files, {sum(file.stat().st_size for file in files) / 1e6:.1f} MB")

    with _step(5, "load the engine in a fresh process, without the compiler, and generate"):
        _say("random weights speak no language; the times are those of the reference backend")
        command = [sys.executable, "-m", "precede", "generate", str(engine)]
        command += [word for prompt in PROMPTS for word in ("--prompt", prompt)]
        command += ["--max-tokens", str(TOKENS), "--temperature", "0", "--ignore-eos"]
        sys.stdout.flush()
        code = subprocess.run(command, check=False).returncode
        if code != 0:
            raise DemoError(f"generating from {engine} ended with exit code {code}; run `{' '.join(command[1:5])} ...`")

    _say(f"done in {time.perf_counter() - begin:.1f} s; next: precede inspect {engine} --pass canonicalize")


@contextmanager
def _step(number: int, title: str) -> Iterator[None]:
    console().rule(f"{number}/{STEPS}", align="left", style="dim")
    _say(title)
    begin = time.perf_counter()
    yield
    console().print(f"step {number} took {time.perf_counter() - begin:.1f} s", style="dim")


def _say(line: str) -> None:
    console().print(line, soft_wrap=True)
