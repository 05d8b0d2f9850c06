"""What the commands do, once their arguments are parsed."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from precede.model.config import PRESETS, ModelConfig, read_json_object
from precede.model.errors import PrecedeError
from precede.terminal import console, printable, progress_bar

if TYPE_CHECKING:
    from precede.report import Report
    from precede.runtime.llm import Prompt
    from precede.runtime.request import RequestOutput


class UsageError(PrecedeError):
    """Arguments that do not go together or cannot be read."""


def parse_numerics(text: str) -> str | tuple[str, bool, bool]:
    """`native`, or `bf16,true,false` as a triple."""
    parts = text.split(",")
    if len(parts) == 1:
        return text
    words = {"true": True, "on": True, "false": False, "off": False}
    if len(parts) != 3 or parts[1].lower() not in words or parts[2].lower() not in words:
        raise UsageError(f"--numerics {text!r}: give a preset or COMPUTE,KV_QUANT,ACT_QUANT as in bf16,true,false")
    return parts[0], words[parts[1].lower()], words[parts[2].lower()]


def parse_ids(text: str) -> list[int]:
    """`5,6,7` as token ids."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"--token-ids {text!r}: give integers with commas between, as in 5,6,7") from None


def init_command(source: str, output: Path, seed: int) -> None:
    """Write a synthetic checkpoint of a preset or a config file."""
    from precede.model.init import init_checkpoint

    if source not in PRESETS and not Path(source).exists():
        raise UsageError(f"{source}: neither a preset ({', '.join(PRESETS)}) nor a file")
    with progress_bar(f"writing {output}") as advance:
        init_checkpoint(source if source in PRESETS else Path(source), output, seed, progress=advance)
    _note(f"checkpoint in {output}")


def compile_command(
    checkpoint: Path | None,
    *,
    config: Path | None,
    fake: bool,
    output: Path | None,
    json_file: Path | None,
    copy_weights: bool,
    options: Mapping[str, Any],
) -> None:
    """Compile a checkpoint and save the engine, or compile a config without weights for inspection."""
    from precede.options import CompileOptions

    chosen = CompileOptions(**options)
    if (checkpoint is None) == (config is None):
        raise UsageError("compile takes either a checkpoint directory or --config FILE --fake")
    if fake != (config is not None):
        raise UsageError("--config and --fake go together: a config alone has no weights, a checkpoint has them")
    if checkpoint is not None and output is None:
        raise UsageError("give -o DIR for the engine folder; to look without saving use --config FILE --fake")
    if fake and output is not None:
        raise UsageError("-o cannot be used with --fake: an engine needs weights")
    if fake and copy_weights:
        raise UsageError("--copy-weights cannot be used with --fake: there are no weights to copy")
    if json_file is not None:
        _check_writable(json_file)
    read = ModelConfig.from_file(config) if config is not None else None
    from precede.compile import compile_config, compile_model

    if read is not None:
        with progress_bar(f"compiling {config}") as advance:
            compiled = compile_config(read, chosen, progress=advance)
    else:
        assert checkpoint is not None
        assert output is not None
        from precede.lowering.bundle import check_place

        check_place(output.absolute())
        with progress_bar(f"compiling {checkpoint}") as advance:
            compiled = compile_model(checkpoint, chosen, progress=advance)
        compiled.save(output, copy_weights=copy_weights)
    publish(compiled.report(), json_file)
    if output is not None:
        _note(f"engine in {output}")


def inspect_command(engine: Path, *, checkpoint: Path | None, name: str | None, json_file: Path | None) -> None:
    """Print a saved engine's report, or the diff of one pass."""
    from precede.inspection import SavedEngine

    if name is not None and json_file is not None:
        raise UsageError("--pass prints a diff and --json writes the report; give one of them")
    if json_file is not None:
        _check_writable(json_file)
    saved = SavedEngine.open(engine, checkpoint=checkpoint)
    if name is not None:
        print(printable(saved.diff(name)))
    else:
        publish(saved.report(), json_file)


def print_checkpoint_table(path: Path) -> None:
    """Print the tensors that a checkpoint of this config has, and their totals, without allocating any."""
    from precede.model.table import skipped_rows, table_rows, totals
    from precede.report import checkpoint_table

    config = ModelConfig.from_file(path)
    rows = [*table_rows(config), *skipped_rows(config, read_json_object(path))]
    console().print(checkpoint_table(rows, totals(rows)))


def generate_command(
    engine: Path,
    *,
    checkpoint: Path | None,
    prompts: Sequence[Prompt],
    as_json: bool,
    profile: bool,
    threads: int,
    params: Mapping[str, Any],
) -> None:
    """Load an engine, generate from one batch, print texts and times."""
    from precede.runtime.sampling import SamplingParams

    sampling = SamplingParams(**params)
    if not prompts:
        raise UsageError("give at least one --prompt TEXT or --token-ids IDS")
    import torch

    from precede.runtime.engine import load_engine
    from precede.runtime.llm import LLM, Step

    torch.set_num_threads(threads)

    with progress_bar(f"loading {engine}") as advance:
        loaded = load_engine(engine, checkpoint=checkpoint, progress=advance)
    with progress_bar("generating") as advance:
        done = 0

        def show(step: Step) -> None:
            nonlocal done
            done += 1
            advance(done, sampling.max_tokens, f"{step.kind}, {step.rows} rows, {step.seconds * 1e3:.0f} ms")

        outputs = LLM(loaded).generate(prompts, sampling, on_step=show)
    step = loaded.profile([len(o.prompt_token_ids) for o in outputs]) if profile else None
    if as_json:
        data: dict[str, Any] = {"outputs": [_output_json(o) for o in outputs]}
        if step is not None:
            data["profile"] = {
                "seconds": step.seconds,
                "aten_ops": step.aten_ops,
                "top": [asdict(t) for t in step.top()],
            }
        print(json.dumps(data))
        return
    from precede.report import generation_table

    for number, output in enumerate(outputs):
        prompt = repr(output.prompt) if output.prompt is not None else f"{len(output.prompt_token_ids)} token ids"
        _say(f"[{number}] {printable(prompt)}")
        _say(printable(output.text) if output.text else f"token ids {list(output.token_ids)}")
    console().print(generation_table(outputs))
    if step is not None:
        _say(f"a decode step after these prompts: {step}")


def publish(report: Report, json_file: Path | None) -> None:
    """Print the tables, or write the JSON to a file ('-': stdout instead of the tables)."""
    if json_file is not None and str(json_file) == "-":
        print(json.dumps(report.json(), indent=1))
        return
    if json_file is not None:
        part = json_file.with_name(f".{json_file.name}.{os.getpid()}.part")
        try:
            part.write_text(json.dumps(report.json(), indent=1) + "\n")
            part.replace(json_file)
        except OSError as error:
            raise UsageError(f"{json_file}: cannot be written: {error.strerror}") from None
        finally:
            part.unlink(missing_ok=True)
    console().print(report)


def _output_json(output: RequestOutput) -> dict[str, Any]:
    return {
        "prompt": output.prompt,
        "prompt_token_ids": output.prompt_token_ids,
        "text": output.text,
        "token_ids": output.token_ids,
        "finish_reason": output.finish_reason,
        "prefill_seconds": output.timings.prefill_seconds,
        "token_seconds": output.timings.token_seconds,
        "tokens_per_second": output.timings.tokens_per_second,
    }


def _check_writable(path: Path) -> None:
    """Refuse a report file before the work that it would report."""
    if str(path) == "-":
        return
    if path.is_dir():
        raise UsageError(f"{path}: is a directory; --json takes a file name")
    if not path.parent.is_dir():
        raise UsageError(f"{path}: the directory {path.parent} does not exist")
    if not os.access(path.parent, os.W_OK):
        raise UsageError(f"{path}: the directory {path.parent} is not writable")


def _note(line: str) -> None:
    """Say what was done; on stderr, so that stdout holds results only."""
    console(stderr=True).print(line, soft_wrap=True)


def _say(line: str) -> None:
    console().print(line, soft_wrap=True)
