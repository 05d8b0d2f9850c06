"""compile_model from a module and from a directory, against the eager model and against the saved engine."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from precede import CompileOptions, SamplingParams, StepBatch, StepRequest, load_engine
from precede.compile import CompiledModel, CompileError, compile_config, compile_model
from precede.lowering.errors import BundleError
from precede.model.cache import Caches, allocate
from precede.model.checkpoint import load_checkpoint
from precede.model.config import ModelConfig
from precede.model.errors import CheckpointError
from precede.model.transformer import Transformer
from precede.options import OptionsError
from precede.runtime.llm import LLM

OPTIONS = CompileOptions(numerics="exact32", page_size=16)


@pytest.fixture(scope="module")
def model(tiny_checkpoint: Path) -> Transformer:
    return load_checkpoint(tiny_checkpoint, "exact32").requires_grad_(False)


@pytest.fixture(scope="module")
def compiled(model: Transformer) -> CompiledModel:
    return compile_model(model, OPTIONS)


def step(compiled: CompiledModel, start: int = 0) -> StepBatch:
    requests = [
        StepRequest(token_ids=[5, 6, 7, 8, 9, 10][: start + 4], start=start, pages=[1], ring=1, logits="all"),
        StepRequest(token_ids=[300, 301][: start + 1], start=start // 2, pages=[2], ring=2),
    ]
    return StepBatch.of(requests, compiled.layout)


def leaves(caches: Caches) -> list[torch.Tensor]:
    return [*caches.window, *caches.latent, *caches.index_key, *caches.group]


def test_compiled_is_eager_bit_for_bit(model: Transformer, compiled: CompiledModel) -> None:
    ours, theirs = (compiled.allocate(pages=3, rings=3) for _ in range(2))
    own = model.layout
    model.set_layout(compiled.layout)
    try:
        for start in (0, 2):
            batch = step(compiled, start)
            assert torch.equal(compiled(batch, ours), model(batch, theirs))
    finally:
        model.set_layout(own)
    assert all(torch.equal(a, b) for a, b in zip(leaves(ours), leaves(theirs), strict=True))
    assert sum(int(leaf.count_nonzero()) for leaf in leaves(ours)) > 0


def test_capture_leaves_the_model_its_layout(model: Transformer, compiled: CompiledModel) -> None:
    assert model.layout.page_size == 128
    assert compiled.layout.page_size == 16


def test_records(compiled: CompiledModel) -> None:
    assert list(compiled.passes) == ["canonicalize", "mega_gate"]
    assert compiled.passes["mega_gate"].matches == 3
    assert "precede.mega_gate" in compiled.diff("mega_gate")
    assert compiled.diff("mega_gate") == str(compiled.passes["mega_gate"].diff)
    with pytest.raises(CompileError, match="no pass 'mega_gat' ran; there are canonicalize, mega_gate"):
        compiled.diff("mega_gat")


def test_report_and_explanation(compiled: CompiledModel) -> None:
    assert "mega_gate" in str(compiled.report())
    assert set(compiled.report().json()) == {"passes", "parts", "decisions"}
    text = compiled.explain()
    assert "not inductor: this version of precede does not build Inductor packages" in text
    assert "without the replay split" in text


def test_a_module_is_saved_with_its_weights(compiled: CompiledModel, tmp_path: Path) -> None:
    compiled.save(tmp_path / "engine")
    (moved := tmp_path / "elsewhere").mkdir()
    engine = load_engine((tmp_path / "engine").rename(moved / "engine"))
    batch = step(compiled)
    ours = compiled(batch, compiled.allocate(pages=3, rings=3))
    assert torch.equal(engine(batch, engine.allocate(pages=3, rings=3)), ours)
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    assert LLM(engine).generate([[5, 6]], params)[0].token_ids == LLM(compiled).generate([[5, 6]], params)[0].token_ids


def test_an_engine_with_copied_weights_needs_no_checkpoint(
    tiny_engine: Path, tiny_checkpoint: Path, compiled: CompiledModel, tmp_path: Path
) -> None:
    compiled.directory = tiny_checkpoint
    try:
        compiled.save(tmp_path / "engine", copy_weights=True)
    finally:
        compiled.directory = None
    engine, pointing = load_engine(tmp_path / "engine"), load_engine(tiny_engine)
    assert engine.bundle.checkpoint.is_relative_to(tmp_path)
    assert pointing.bundle.checkpoint == tiny_checkpoint
    batch = step(compiled)
    first, second = (e(batch, allocate(e.layout, pages=3, rings=3)) for e in (engine, pointing))
    assert torch.equal(first, second)
    assert engine.tokenizer is not None
    assert engine.config == pointing.config


def test_weights_that_no_checkpoint_holds_are_not_saved(
    compiled: CompiledModel, model: Transformer, tmp_path: Path
) -> None:
    weight = model.layers[1].attn.wq_a.weight  # type: ignore[union-attr]
    before = weight.detach().clone()
    weight.add_(1e-6)  # type: ignore[operator]
    try:
        with pytest.raises(
            CheckpointError, match=r"layers\.1\.attn\.wq_a\.weight: its values have no exact F8_E4M3 form"
        ):
            compiled.save(tmp_path / "engine")
    finally:
        weight.copy_(before)  # type: ignore[operator]
    assert list(tmp_path.iterdir()) == []


def test_only_our_models_compile() -> None:
    with pytest.raises(CompileError, match="a Linear cannot be compiled"):
        compile_model(torch.nn.Linear(2, 2), OPTIONS)


def test_options_must_agree_with_the_model(model: Transformer) -> None:
    with pytest.raises(OptionsError, match="numerics = 'native', but the model computes in exact32"):
        compile_model(model)


class Nothing:
    """A pass that does nothing."""

    name = "mega_gate"
    numerics = "exact"

    def expects(self, graph, context):
        return None

    def run(self, graph, context):
        return None


def test_pass_names_are_checked_before_anything_is_loaded() -> None:
    with pytest.raises(
        OptionsError, match="disable names 'mega_gat', which is no pass; there are canonicalize, mega_gate"
    ):
        compile_model("nowhere", CompileOptions(disable=["mega_gat"]))
    with pytest.raises(OptionsError, match="stop_after names 'x'"):
        compile_model("nowhere", CompileOptions(stop_after="x"))
    with pytest.raises(OptionsError, match="extra_passes has 'mega_gate', a name that another pass has"):
        compile_model("nowhere", CompileOptions(extra_passes=(Nothing(),)))  # type: ignore[arg-type]


def test_verify_numerics_needs_weights(tiny_config: Path) -> None:
    with pytest.raises(OptionsError, match="needs weights"):
        compile_config(ModelConfig.from_file(tiny_config), CompileOptions(verify="numerics"))


@pytest.mark.slow
def test_without_weights_there_is_a_graph_and_nothing_to_run(tiny_config: Path, tmp_path: Path) -> None:
    seen: list[str] = []
    options = CompileOptions(numerics="exact32", page_size=16, stop_after="canonicalize")
    config = ModelConfig.from_file(tiny_config)
    compiled = compile_config(config, options, progress=lambda done, total, what: seen.append(what))
    assert seen == ["capture", "passes", "program", ""]
    assert list(compiled.passes) == ["canonicalize"]
    with pytest.raises(CompileError, match="cannot run"):
        compiled(step(compiled), compiled.allocate(pages=3, rings=3))
    with pytest.raises(CompileError, match="cannot be saved"):
        compiled.save(tmp_path / "engine")


@pytest.mark.parametrize("options", [{"page_size": 16}, {}, 5])
def test_options_of_another_kind_are_refused(options: object) -> None:
    with pytest.raises(OptionsError, match=r"options = .*; it takes CompileOptions"):
        compile_model("nowhere", options)  # type: ignore[arg-type]


@pytest.mark.slow
def test_verify_numerics_runs_the_graph_and_extra_passes_run_last(model: Transformer) -> None:
    class Last(Nothing):
        name = "last"

    options = CompileOptions(numerics="exact32", page_size=16, verify="numerics", extra_passes=(Last(),))  # type: ignore[arg-type]
    compiled = compile_model(model, options)
    assert list(compiled.passes) == ["canonicalize", "mega_gate", "last"]
    assert compiled.options.to_json()["extra_passes"] == ["last"]


@pytest.mark.slow
def test_a_compiled_directory_is_the_one_that_is_saved(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(tiny_checkpoint, tmp_path / "ckpt")
    monkeypatch.chdir(tmp_path)
    compiled = compile_model("ckpt", OPTIONS)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert compiled.directory == tmp_path / "ckpt"
    compiled.save(tmp_path / "engine")
    assert load_engine(tmp_path / "engine").bundle.checkpoint == tmp_path / "ckpt"
    file = next((tmp_path / "ckpt").glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(BundleError, match="has changed since the model was compiled"):
        compiled.save(tmp_path / "other")
    assert not (tmp_path / "other").exists()
