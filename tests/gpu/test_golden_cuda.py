"""The eager model on a GPU against the golden numbers: prefill, decode and both replays."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from ..golden_cases import Case, Runner, check

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    cases: list[Case] = metafunc.config.golden_cases  # type: ignore[attr-defined]
    # Quantised modes choose differently after one flipped rounding, so another machine is judged on the smooth cases.
    pairs = [
        pytest.param(c, m, id=f"{c.name}-{m}") for c in cases for m in c.modes() if m == "exact" or "bf16" in c.modes()
    ]
    metafunc.parametrize(("case", "mode"), pairs, scope="module")


@pytest.fixture(scope="module")
def runner(case: Case, mode: str) -> Iterator[Runner]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    with torch.no_grad():
        yield Runner(case, mode, "cuda")
    torch.backends.cuda.matmul.allow_tf32 = before


def test_prefill_and_decode(runner: Runner) -> None:
    seq = runner.sequences()
    count = len(seq.prompts[0])
    check(runner, seq.step(0, count), "logits")
    start = max(runner.case.inputs["decode_from"])
    seq = runner.sequences()
    seq.step(0, start)
    check(runner, seq.decode(start, count), f"decode_from_{start}")


def test_replays(runner: Runner) -> None:
    window = runner.case.config.sliding_window
    for run in runner.case.inputs.get("replay", []):
        seq = runner.sequences(replay=True)
        check(runner, seq.step(0, run["prompt"], keep=window), f"replay_{run['prompt']}.tail")
    for run in runner.case.inputs.get("prefix_hit", []):
        hit, n = run["hit"], run["prompt"]
        seq = runner.sequences(replay=True)
        seq.step(0, hit)
        start = hit - window
        late_floor = max(start, n - window)
        got = seq.step(start, n, write_from=hit, window_floor=start, keep=window, late_floor=late_floor)
        name = f"hit_{hit}_{n}.tail"
        check(runner, got[:, -runner.expected[name].shape[1] :], name)
