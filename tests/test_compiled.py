"""The compiled program: equal to the eager model bit for bit, and to the golden numbers.

Bit equality is promised on the reference backend for equal batch shapes, thread count and torch build.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch.utils import _pytree as pytree

from precede.compile import CompiledModel, compile_model
from precede.model.batch import StepBatch, StepRequest
from precede.model.cache import allocate
from precede.model.transformer import Transformer
from precede.options import CompileOptions
from precede.runtime.engine import load_engine

from .golden_cases import Case, Runner, check

NAN = float("nan")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "mode" in metafunc.fixturenames:
        cases: list[Case] = metafunc.config.golden_cases  # type: ignore[attr-defined]
        pairs = [pytest.param(c, m, id=f"{c.name}-{m}") for c in cases for m in c.modes()]
        metafunc.parametrize(("case", "mode"), pairs, scope="module")


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def golden(case: Case, mode: str) -> Runner:
    runner = Runner(case, mode)
    n = runner.model.numerics
    options = CompileOptions(numerics=(n.compute, n.kv_quant, n.act_quant), page_size=16, target="cpu")
    compiled = compile_model(runner.model, options)
    assert compiled.passes["mega_gate"].matches == case.config.num_hidden_layers
    runner.forward = compiled
    return runner


@pytest.mark.slow
def test_golden_prefill_and_decode(golden: Runner) -> None:
    count = len(golden.case.prompts[0])
    check(golden, golden.sequences().step(0, count), "logits")
    rows = [golden.sequences().step(0, n, logits="last")[:, -1] for n in golden.case.inputs["prefill_lengths"]]
    check(golden, torch.stack(rows), "prefill_last")
    for start in golden.case.inputs["decode_from"]:
        seq = golden.sequences()
        seq.step(0, start)
        check(golden, seq.decode(start, count), f"decode_from_{start}")


PRESETS = ["nano", pytest.param("mini", marks=pytest.mark.slow)]
Models = Callable[..., Transformer]
Compiled = Callable[[str, str], CompiledModel]


def mixed(model: Transformer, compiled: CompiledModel, rows: int) -> list[StepBatch]:
    """A first step for three requests, then one in which `rows` rows are decodes and a chunk among padding."""
    rng = random.Random(rows)
    vocab, layout = model.config.vocab_size - 8, compiled.layout
    ids = [[rng.randrange(3, vocab) for _ in range(n)] for n in (20, 9, 3 + rows)]
    pages = [[1, 2], [3], list(range(4, 14))]
    ends = [19, 8, 3]
    first = [StepRequest(token_ids=ids[i][: ends[i]], pages=pages[i], ring=i + 1) for i in range(3)]
    starts = ends if rows > 2 else [None, None, 3]
    second = [
        StepRequest(token_ids=ids[i], start=s, pages=pages[i], ring=i + 1, logits="all")
        for i, s in enumerate(starts)
        if s is not None
    ]
    return [StepBatch.of(first, layout), StepBatch.of(second, layout, rows=None if rows == 1 else rows + 5, slots=4)]


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("rows", [1, 2, 7, 64, 129])
def test_exact32_equals_eager_bit_for_bit(model_of: Models, compiled_of: Compiled, preset: str, rows: int) -> None:
    same_bits(model_of(preset, "exact32"), compiled_of(preset, "exact32"), rows)


@pytest.mark.slow
@pytest.mark.parametrize("numerics", ["native", "qat_bf16"])
@pytest.mark.parametrize("preset", ["nano", "mini"])
def test_quantised_presets_equal_eager_bit_for_bit(
    model_of: Models, compiled_of: Compiled, preset: str, numerics: str
) -> None:
    same_bits(model_of(preset, numerics), compiled_of(preset, numerics), 24)


def same_bits(model: Transformer, compiled: CompiledModel, rows: int) -> None:
    """Logits and caches of two steps."""
    model.set_layout(compiled.layout)
    ours, theirs = (allocate(compiled.layout, pages=14, rings=4) for _ in range(2))
    for batch in mixed(model, compiled, rows):
        assert torch.equal(compiled(batch, ours), model(batch, theirs))
    for a, b in zip(pytree.tree_leaves(ours), pytree.tree_leaves(theirs), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("preset", PRESETS)
def test_poison_changes_no_output_of_the_program(model_of: Models, compiled_of: Compiled, preset: str) -> None:
    model, compiled = model_of(preset, "exact32"), compiled_of(preset, "exact32")
    outs = []
    for fill in (0.0, NAN):
        caches = allocate(compiled.layout, pages=20, rings=6)
        for pool in pytree.tree_leaves(caches):
            pool.fill_(fill)
        outs.append([compiled(batch, caches) for batch in mixed(model, compiled, 24)])
    for clean, dirty in zip(*outs, strict=True):
        assert torch.isfinite(dirty).all()
        assert torch.equal(clean, dirty)


@pytest.mark.slow
def test_disabled_pass_leaves_the_plain_graph(model_of: Models, compiled_of: Compiled) -> None:
    """Without the pass the routers stay as they are, and the program gives the same bits."""
    model = model_of("nano", "exact32")
    plain = compile_model(model, CompileOptions(numerics="exact32", page_size=16, disable=("mega_gate",)))
    assert "mega_gate" not in plain.passes
    assert not [n for n in plain.part.nodes if n.target.startswith("precede.mega_gate")]
    fused = compiled_of("nano", "exact32")
    assert len([n for n in fused.part.nodes if n.target.startswith("precede.mega_gate")]) == 10
    same_bits(model, plain, 24)


def test_saved_engine_gives_the_same_bits(model_of: Models, compiled_of: Compiled, tmp_path: Path) -> None:
    compiled = compiled_of("nano", "exact32")
    compiled.save(tmp_path / "engine")
    engine = load_engine(tmp_path / "engine")
    ours, theirs = (allocate(compiled.layout, pages=14, rings=4) for _ in range(2))
    for batch in mixed(model_of("nano", "exact32"), compiled, 24):
        assert torch.equal(engine(batch, ours), compiled(batch, theirs))
