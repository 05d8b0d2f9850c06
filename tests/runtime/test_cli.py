"""The commands, in this process; a few in their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import precede
from precede.cli import app
from precede.commands import parse_ids, parse_numerics

from .conftest import invoke

COMMANDS = ["init", "compile", "inspect", "generate", "demo"]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(command: str) -> None:
    out = invoke(command, "--help", code=0).stdout
    assert f"Example: precede {command}" in out


def test_the_root_lists_the_commands() -> None:
    assert {c.name or c.callback.__name__ for c in app.registered_commands} == set(COMMANDS)  # type: ignore[union-attr]
    assert invoke(code=0).stdout == invoke("--help", code=0).stdout
    assert all(command in invoke(code=0).stdout for command in COMMANDS)


def test_version() -> None:
    assert invoke("--version", code=0).stdout == f"precede {precede.__version__}\n"


def test_python_m_precede_and_a_fault_in_its_own_process() -> None:
    run = [sys.executable, "-m", "precede"]
    done = subprocess.run([*run, "--version"], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"precede {precede.__version__}\n", "")
    done = subprocess.run([*run, "inspect", "nowhere"], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "precede: nowhere: no such folder; an engine is a folder made by compile and save\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_stdout_is_named() -> None:
    for flag in ("", "-u"):
        line = f"'{sys.executable}' {flag} -m precede --version >/dev/full"
        done = subprocess.run(line, shell=True, capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stderr) == (2, "precede: stdout: cannot be written: No space left on device\n")


@pytest.mark.slow
def test_output_that_an_encoding_cannot_hold(tiny_engine: Path) -> None:
    run = [sys.executable, "-m", "precede", "generate", str(tiny_engine), "--prompt", "é :smile: [/x]", "--max-tokens"]
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([*run, "2"], capture_output=True, timeout=120, check=False, env=env)
    assert done.returncode == 0, done.stderr
    assert b"'\\xe9 :smile: [/x]'" in done.stdout


def test_a_batch_that_no_memory_holds(tiny_engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("precede.runtime.engine.allocate", lambda *_, **__: torch.zeros(1 << 62))
    line = invoke("generate", tiny_engine, "--prompt", "x", code=2).stderr
    assert "bytes, which could not be allocated" in line


@pytest.mark.slow
@pytest.mark.parametrize("closed", ["stdout", "stderr", "both"])
def test_closed_streams(closed: str) -> None:
    closing = {"stdout": ">&-", "stderr": "2>&-", "both": ">&- 2>&-"}[closed]
    for words, code in (("--version", 0), ("inspect nowhere", 2)):
        line = f"'{sys.executable}' -m precede {words} {closing}"
        done = subprocess.run(line, shell=True, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == code
        assert "Traceback" not in done.stderr


def test_init_gives_equal_bytes_for_equal_seeds(tiny_config: Path, tiny_checkpoint: Path, tmp_path: Path) -> None:
    invoke("init", tiny_config, "-o", tmp_path / "again", "--seed", 3, code=0)
    invoke("init", tiny_config, "-o", tmp_path / "other", "--seed", 4, code=0)
    for file in tiny_checkpoint.glob("*.safetensors"):
        assert (tmp_path / "again" / file.name).read_bytes() == file.read_bytes()
    weights = "model-00001-of-00001.safetensors"
    assert (tmp_path / "other" / weights).read_bytes() != (tiny_checkpoint / weights).read_bytes()


def test_compile_writes_its_report(tiny_engine: Path, workplace: Path) -> None:
    report = json.loads((workplace / "report.json").read_text())
    gate = next(p for p in report["passes"] if p["name"] == "mega_gate")
    assert (gate["matches"], gate["expected"], gate["misses"]) == (3, 3, [])
    assert gate["nodes_after"] < gate["nodes_before"]
    assert [part["name"] for part in report["parts"]] == ["main"]
    assert report["parts"][0]["outputs"][0]["shape"] == ["L", 512]
    assert {"op", "part", "implementation", "reason", "refused"} == set(report["decisions"][0])


def test_inspect_prints_what_compile_did(tiny_engine: Path, workplace: Path, tmp_path: Path) -> None:
    out = invoke("inspect", tiny_engine, code=0).stdout
    assert "mega_gate" in out
    assert "reference" in out
    report = json.loads((workplace / "report.json").read_text())
    assert json.loads(invoke("inspect", tiny_engine, "--json", "-", code=0).stdout) == report
    invoke("inspect", tiny_engine, "--json", tmp_path / "r.json", code=0)
    assert json.loads((tmp_path / "r.json").read_text()) == report
    assert [p.name for p in tmp_path.iterdir()] == ["r.json"]


def test_inspect_prints_a_diff(tiny_engine: Path) -> None:
    out = invoke("inspect", tiny_engine, "--pass", "mega_gate", code=0).stdout
    assert out.startswith("@@ layer")
    assert "+ %Li.ffn.gate" in out
    assert "precede.mega_gate" in out


def test_checkpoint_table_of_the_published_config() -> None:
    config = Path(precede.model.config.__file__).parent / "configs" / "published.json"
    out = invoke("inspect", "--checkpoint-table", config, code=0).stdout
    assert "96,085" in out
    assert "510,286,023,000" in out


def test_generate_prints_text_and_times(tiny_engine: Path) -> None:
    words = ["generate", tiny_engine, "--prompt", "hi", "--token-ids", "5,6,7", "--max-tokens", 3, "--temperature", 0]
    out = invoke(*words, "--ignore-eos", code=0).stdout
    assert "[0] 'hi'" in out
    assert "[1] 3 token ids" in out
    assert "tokens/s" in out
    assert "\x1b" not in out


def test_generate_json_is_repeatable(tiny_engine: Path) -> None:
    words = ["generate", tiny_engine, "--prompt", "hi", "--max-tokens", 4, "--seed", 7, "--ignore-eos", "--json"]
    first, second = (json.loads(invoke(*words, code=0).stdout)["outputs"][0] for _ in range(2))
    assert first["token_ids"] == second["token_ids"]
    assert (len(first["token_ids"]), first["finish_reason"], first["prompt"]) == (4, "length", "hi")
    assert len(first["token_seconds"]) == 3
    other = json.loads(invoke(*words[:-3], 8, *words[-2:], code=0).stdout)["outputs"][0]
    assert other["token_ids"] != first["token_ids"]


def test_generate_shows_where_a_step_goes(tiny_engine: Path) -> None:
    words = ["generate", tiny_engine, "--prompt", "hi", "--token-ids", "5,6,7", "--max-tokens", 1, "--profile"]
    out = invoke(*words, code=0).stdout
    assert "ATen calls" in out
    assert "precede.linear" in out
    profile = json.loads(invoke(*words, "--json", code=0).stdout)["profile"]
    assert profile["aten_ops"] > 1000
    assert len(profile["top"]) == 10
    assert profile["top"][0]["seconds"] >= profile["top"][9]["seconds"] > 0


@pytest.mark.slow
def test_generating_process_never_loads_the_compiler(tiny_engine: Path) -> None:
    code = (
        "import sys\nfrom precede import LLM, SamplingParams, load_engine\n"
        f"llm = LLM(load_engine({str(tiny_engine)!r}))\n"
        "out = llm.generate([[5, 6]], SamplingParams(max_tokens=2, temperature=0, ignore_eos=True))\n"
        "assert len(out[0].token_ids) == 2\n"
        "bad = [m for m in sys.modules if m.startswith('precede.passes') or m == 'precede.compile']\n"
        "assert not bad, bad\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_compile_a_config_without_weights(tiny_config: Path) -> None:
    words = ["compile", "--config", tiny_config, "--fake", "--json", "-", "--disable", "mega_gate", "--page-size", 16]
    report = json.loads(invoke(*words, code=0).stdout)
    assert [p["name"] for p in report["passes"]] == ["canonicalize"]


@pytest.mark.slow
def test_demo(tmp_path: Path) -> None:
    run = [sys.executable, "-m", "precede", "demo", "-o", str(tmp_path / "demo")]
    done = subprocess.run(run, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert "mega_gate" in done.stdout
    assert "tokens/s" in done.stdout
    assert (tmp_path / "demo" / "engine" / "manifest.json").is_file()


def test_arguments_that_are_little_languages() -> None:
    assert parse_numerics("native") == "native"
    assert parse_numerics("bf16,true,off") == ("bf16", True, False)
    assert parse_ids("5, 6,7") == [5, 6, 7]
