"""The command line. Heavy imports wait inside the commands, so that `--help` answers at once.

A fault on the user's side (PrecedeError, an OSError, a wrong option) is one line on stderr and exit code 2.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from precede.model.errors import PrecedeError
from precede.terminal import complain, make_streams_safe

# The base of everything the parser raises; its home differs between versions of typer, its place in the family not.
UsageFault: Any = typer.BadParameter.__mro__[2]

# What some versions of the parser make of Ctrl-C; to the caller it is a fault like the others.
INTERRUPTED = 130


class OneLineErrors(TyperGroup):
    """The group of all commands; turns what a user can cause into one line and exit code 2."""

    def main(self, *args: Any, standalone_mode: bool = True, **extra: Any) -> Any:
        """Run, then exit; `standalone_mode` False returns instead, for embedding."""
        try:
            _check_text(extra["args"] if extra.get("args") is not None else args[0] if args else sys.argv[1:])
            result = super().main(*args, standalone_mode=False, **extra)
            code = result if isinstance(result, int) else 0
            sys.stdout.flush()
        except (KeyboardInterrupt, typer.Abort):
            code = INTERRUPTED
        except BrokenPipeError:
            _drop_stdout()
            code = 1
        except UsageFault as fault:
            context = getattr(fault, "ctx", None)
            path = context.command_path if context is not None else "precede"
            code = complain(f"{fault.format_message().rstrip('.')}; see '{path} --help'", 2)
        except PrecedeError as error:
            code = complain(str(error), 2)
        except OSError as error:
            where = f"{error.filename}: " if error.filename else ""
            if not where and error.errno == errno.ENOSPC:
                # Whoever writes a file names it; what has no name is what we print to.
                where = "stdout: cannot be written: "
                _drop_stdout()
            code = complain(f"{where}{error.strerror or error}", 2)
        if code == INTERRUPTED:
            code = complain("interrupted; what was not finished was not written", 2)
        if not standalone_mode:
            return code
        sys.exit(code)


def _drop_stdout() -> None:
    """Send what is still buffered nowhere, so that the interpreter does not stumble over it at its end."""
    with suppress(io.UnsupportedOperation):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _check_text(words: Sequence[str]) -> None:
    """Refuse what the system could not decode: such a text has no tokens, and a manifest cannot name such a path."""
    for word in words:
        try:
            word.encode()
        except UnicodeEncodeError:
            raise PrecedeError(f"argument {word!r}: is not UTF-8; rename the file or write the text as UTF-8") from None


app = typer.Typer(
    cls=OneLineErrors,
    invoke_without_command=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Entry point of the console script and of `python -m precede`."""
    make_streams_safe()
    app(prog_name="precede")


@app.callback(epilog="Example: precede demo")
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Compile DeepSeek-V4.1-Flash from its eager definition to an engine, by readable graph passes."""
    if version:
        import precede

        print(f"precede {precede.__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit


JsonFile = Annotated[
    Path | None, typer.Option("--json", help="Write the report as JSON; '-' is stdout.", metavar="FILE")
]


CheckpointDir = Annotated[
    Path | None, typer.Option("--checkpoint", help="Where the engine's checkpoint is now, if it moved.", metavar="DIR")
]


@app.command(epilog="Example: precede init nano -o nano/ --seed 1")
def init(
    source: Annotated[str, typer.Argument(metavar="nano|mini|slice|CONFIG.json", help="A preset or a config file.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Directory to make.", metavar="DIR")],
    seed: Annotated[int, typer.Option(help="Equal seeds give equal bytes.", min=0)] = 0,
) -> None:
    """Write a synthetic checkpoint in the published layout: real names, shapes and formats, random weights."""
    from precede.commands import init_command

    init_command(source, output, seed)


@app.command("compile", epilog="Example: precede compile nano/ -o engine/ --numerics exact32")
def compile_(
    checkpoint: Annotated[Path | None, typer.Argument(metavar="CKPT", help="A checkpoint directory.")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Engine folder to write.", metavar="DIR")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="Compile this config without weights; needs --fake.")] = None,
    fake: Annotated[bool, typer.Option("--fake", help="With --config: no weights, for inspection only.")] = False,
    numerics: Annotated[
        str, typer.Option(help="exact32, qat_bf16, native, or COMPUTE,KV_QUANT,ACT_QUANT as in bf16,true,false.")
    ] = "native",
    target: Annotated[str, typer.Option(help="What the engine is for: host, cpu, sm_90, sm_100, sm_120.")] = "host",
    backend: Annotated[str, typer.Option(help="auto, reference, inductor, program, tensorrt.")] = "auto",
    disable: Annotated[list[str] | None, typer.Option(help="Leave a pass out; repeatable.", metavar="NAME")] = None,
    stop_after: Annotated[str | None, typer.Option(help="Last pass to run.", metavar="NAME")] = None,
    verify: Annotated[str, typer.Option(help="Checks after every pass: off, structure, numerics.")] = "structure",
    allow_misses: Annotated[
        bool, typer.Option("--allow-misses", help="Accept fusions that matched too little.")
    ] = False,
    page_size: Annotated[int, typer.Option(help="Tokens of a KV page.")] = 128,
    kv_format: Annotated[str, typer.Option(help="How latents are stored: auto, nvfp4, fp8, bf16.")] = "auto",
    late_start: Annotated[str, typer.Option(help="First layer on kept rows only: cut or cut+1.")] = "cut",
    tensor_parallel: Annotated[int, typer.Option(help="Devices that share one model.")] = 1,
    swa_bounded_replay: Annotated[
        bool, typer.Option(help="Whether rows that only a window needs may be skipped.")
    ] = True,
    copy_weights: Annotated[
        bool, typer.Option("--copy-weights", help="Put the weights into the engine folder instead of pointing to CKPT.")
    ] = False,
    json_file: JsonFile = None,
) -> None:
    """Capture a checkpoint's model, run the passes, and save an engine folder."""
    from precede.commands import compile_command, parse_numerics

    compile_command(
        checkpoint,
        config=config,
        fake=fake,
        output=output,
        json_file=json_file,
        copy_weights=copy_weights,
        options={
            "target": target,
            "backend": backend,
            "numerics": parse_numerics(numerics),
            "tensor_parallel": tensor_parallel,
            "swa_bounded_replay": swa_bounded_replay,
            "late_start": late_start,
            "page_size": page_size,
            "kv_format": kv_format,
            "disable": disable or (),
            "stop_after": stop_after,
            "verify": verify,
            "allow_misses": allow_misses,
        },
    )


@app.command(epilog="Example: precede inspect engine/ --pass mega_gate")
def inspect(
    engine: Annotated[Path | None, typer.Argument(metavar="ENGINE", help="An engine folder.")] = None,
    name: Annotated[str | None, typer.Option("--pass", help="Print this pass's diff.", metavar="NAME")] = None,
    table: Annotated[
        Path | None,
        typer.Option(
            "--checkpoint-table", help="Print the tensors of a checkpoint of this config.", metavar="CONFIG.json"
        ),
    ] = None,
    checkpoint: CheckpointDir = None,
    json_file: JsonFile = None,
) -> None:
    """Print what a compilation did: passes, parts and decisions, or one pass's folded diff."""
    from precede.commands import inspect_command, print_checkpoint_table

    if (engine is None) == (table is None):
        raise PrecedeError("inspect takes either an engine folder or --checkpoint-table CONFIG.json")
    if table is not None:
        if not (name is None and checkpoint is None and json_file is None):
            raise PrecedeError("--checkpoint-table prints a table only; it takes no --pass, --checkpoint or --json")
        print_checkpoint_table(table)
    elif engine is not None:
        inspect_command(engine, checkpoint=checkpoint, name=name, json_file=json_file)


@app.command(epilog="Example: precede generate engine/ --prompt 'Hello' --max-tokens 32 --temperature 0")
def generate(
    engine: Annotated[Path, typer.Argument(help="An engine folder.")],
    prompt: Annotated[list[str] | None, typer.Option(help="A text; repeatable, one batch.", metavar="TEXT")] = None,
    token_ids: Annotated[
        list[str] | None, typer.Option(help="A prompt as ids, as in 5,6,7; repeatable.", metavar="IDS")
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 32,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="Draw from the smallest set of this mass.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Draw from this many likeliest; 0: all.")] = 0,
    seed: Annotated[int | None, typer.Option(help="Makes draws repeatable.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this string; repeatable.", metavar="TEXT")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after the end of sequence.")] = False,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads; small models are quickest with one.")] = 1,
    checkpoint: CheckpointDir = None,
    profile: Annotated[bool, typer.Option("--profile", help="Also print where a decode step's time goes.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Load an engine and generate from one batch of prompts."""
    from precede.commands import generate_command, parse_ids

    generate_command(
        engine,
        checkpoint=checkpoint,
        prompts=[*(prompt or []), *map(parse_ids, token_ids or [])],
        as_json=as_json,
        profile=profile,
        threads=threads,
        params={
            "max_tokens": max_tokens,
            "temperature": temperature,
            "top_p": top_p,
            "top_k": top_k,
            "seed": seed,
            "stop": tuple(stop or ()),
            "ignore_eos": ignore_eos,
        },
    )


@app.command(epilog="Example: precede demo -o demo/")
def demo(
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Where the checkpoint and the engine go.", metavar="DIR")
    ] = Path("precede-demo"),
) -> None:
    """Make a small checkpoint if there is none, compile it, save the engine, load it in a new process and generate."""
    from precede.demo import run_demo

    run_demo(output)
