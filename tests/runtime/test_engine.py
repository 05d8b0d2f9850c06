"""A loaded engine: what it tells, and what it refuses."""

import hashlib
import json
import shutil

import pytest

from precede import LLM, SamplingParams, load_engine
from precede.inspection import InspectionError, SavedEngine
from precede.lowering.errors import EngineMismatch


def test_an_engine_says_what_it_is(tiny_engine, tiny_checkpoint):
    seen = []
    engine = load_engine(tiny_engine, progress=lambda done, total, name: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] > 0
    assert engine.config.num_hidden_layers == 3
    assert (engine.layout.page_size, engine.layout.numerics.describe()) == (16, "exact32")
    assert engine.manifest.backend == "reference"
    assert engine.manifest.options.values["page_size"] == 16
    assert engine.tokenizer is engine.tokenizer is not None
    caches = engine.allocate(pages=5, rings=3)
    assert {t.shape[0] for t in caches.latent} == {5}
    assert {t.shape[0] for t in caches.window} == {3}


def test_an_engine_without_tokenizer_takes_ids_only(tiny_engine, tmp_path, monkeypatch):
    engine = load_engine(tiny_engine)
    monkeypatch.setattr(type(engine), "tokenizer", None)
    params = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
    output = LLM(engine).generate([[5, 6]], params)[0]
    assert (len(output.token_ids), output.text) == (2, "")


def test_neither_chunks_nor_company_change_a_greedy_output(tiny_engine):
    engine = load_engine(tiny_engine)
    prompts = ["Compile precedes serve", list(range(300, 340)), [7], "é"]
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    together = [o.token_ids for o in LLM(engine).generate(prompts, params)]
    assert [o.token_ids for o in LLM(engine, max_step_tokens=9).generate(prompts, params)] == together
    assert [LLM(engine).generate([prompt], params)[0].token_ids for prompt in prompts] == together
    assert len(set(together)) == len(prompts)


def test_text_is_the_tokens_decoded(tiny_engine):
    engine = load_engine(tiny_engine)
    output = LLM(engine).generate(["x"], SamplingParams(max_tokens=20, seed=4, ignore_eos=True))[0]
    assert output.text == engine.tokenizer.decode(output.token_ids)


def test_a_moved_checkpoint_is_found_where_the_caller_says(tiny_engine, tiny_checkpoint, tmp_path):
    moved = tmp_path / "moved"
    shutil.copytree(tiny_checkpoint, moved)
    assert load_engine(tiny_engine, checkpoint=moved).bundle.checkpoint == moved
    (moved / "config.json").write_text(
        (moved / "config.json").read_text().replace('"swiglu_limit": 1.0', '"swiglu_limit": 2.0')
    )
    with pytest.raises(EngineMismatch, match=r"swiglu_limit is 2\.0, the engine was compiled for 1\.0"):
        load_engine(tiny_engine, checkpoint=moved)


def test_a_saved_engine_answers_questions(tiny_engine):
    saved = SavedEngine.open(tiny_engine)
    assert [p["name"] for p in saved.report().passes] == ["canonicalize", "mega_gate"]
    assert "precede.mega_gate" in saved.diff("mega_gate")
    with pytest.raises(InspectionError, match="no pass 'x' ran; there are canonicalize, mega_gate"):
        saved.diff("x")


@pytest.mark.parametrize("change", ["twice", "width", "dtype"])
def test_an_engine_gives_logits_only(tiny_engine, tmp_path, change):
    engine = tmp_path / "engine"
    shutil.copytree(tiny_engine, engine)
    part, manifest = (json.loads((engine / name).read_text()) for name in ("parts/main.json", "manifest.json"))
    output = part["outputs"][0]
    manifest["checkpoint"]["relative"] = None
    if change == "twice":
        part["outputs"] = [output, output]
    else:
        output.update({"shape": [output["shape"][0], 7]} if change == "width" else {"dtype": "bfloat16"})
    manifest["parts"][0]["outputs"] = part["outputs"]
    data = json.dumps(part).encode()
    (engine / "parts/main.json").write_bytes(data)
    entry = next(f for f in manifest["files"] if f["path"] == "parts/main.json")
    entry.update(size=len(data), sha256=hashlib.sha256(data).hexdigest())
    (engine / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(EngineMismatch, match="an engine gives logits float32"):
        load_engine(engine)
