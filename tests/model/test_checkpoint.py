from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors import safe_open

from precede.model import checkpoint as checkpoint_module
from precede.model.checkpoint import Checkpoint, load_checkpoint
from precede.model.errors import CheckpointError, ConfigError
from precede.model.formats import decode_fp4, decode_fp8, decode_rows
from precede.model.init import SKIPPED_TENSORS
from precede.model.shards import INDEX_NAME, SINGLE_NAME
from precede.model.tokens import TOKEN_MAP_NAME, TOKENIZER_NAME
from precede.model.writer import safetensors_bytes

from ..conftest import GOLDEN
from .checkpoint_files import copy_nano, edit_index, edited_nano, nano_directory, stored_tensors

WQ_A = "layers.3.attn.wq_a"
EXPERT = "layers.2.ffn.experts.5.w2"


@pytest.fixture(scope="module")
def model():
    return load_checkpoint(nano_directory(), "exact32")


def test_open_reads_names_and_skips_what_is_no_backbone():
    opened = Checkpoint.open(nano_directory())
    assert opened.extents.keys() == opened.table.keys()
    assert sorted(opened.skipped) == sorted(SKIPPED_TENSORS)


def test_every_parameter_holds_the_exact_decoded_value(model):
    stored = stored_tensors(nano_directory())
    state = dict(model.named_parameters())
    seen = set()
    for name, spec in Checkpoint.open(nano_directory()).table.items():
        if spec.is_scale or spec.kind == "table":
            continue
        wanted = stored[name].float()
        if spec.scale_name is not None:
            decode = decode_fp4 if spec.kind == "fp4" else decode_fp8
            wanted = decode(stored[name], stored[spec.scale_name].view(torch.uint8))
        value = state[spec.target] if spec.expert is None else state[spec.target][spec.expert]
        assert torch.equal(value, wanted), name
        seen.add(spec.target)
    assert seen == state.keys()


def test_expert_bytes_against_a_hand_decoder(model):
    stored = stored_tensors(nano_directory())
    byte = int(stored[f"{EXPERT}.weight"].view(torch.uint8)[7, 3])
    scale = 2.0 ** (int(stored[f"{EXPERT}.scale"].view(torch.uint8)[7, 0]) - 127)
    grid = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
    pair = [(-1 if n & 8 else 1) * grid[n & 7] * scale for n in (byte & 15, byte >> 4)]
    assert dict(model.named_parameters())["layers.2.ffn.experts.w2"][5, 7, 6:8].tolist() == pair


def test_parameters_lie_aligned_and_alone(model):
    tensors = [*model.parameters(), *model.buffers()]
    assert not any(t.is_meta for t in tensors)
    assert all(p.data_ptr() % 64 == 0 for p in model.parameters())
    owned = [p.untyped_storage().data_ptr() for p in model.parameters()]
    assert len(set(owned)) == len(owned)


def test_native_keeps_the_dtypes_that_the_model_asks_for():
    native = load_checkpoint(nano_directory(), "native")
    fresh = type(native)(native.config, native.numerics, device="meta")
    assert {n: p.dtype for n, p in native.named_parameters()} == {n: p.dtype for n, p in fresh.named_parameters()}
    exact = dict(load_checkpoint(nano_directory(), "exact32").named_parameters())
    assert all(torch.equal(p.float(), exact[n]) for n, p in native.named_parameters())


def test_engram_tables_are_mapped_and_hold_the_stored_bytes(model):
    stored = stored_tensors(nano_directory())
    codes, scale = table_of(model, 1)
    assert torch.equal(codes.view(torch.uint8), stored["layers.1.engram.embed.weight"].view(torch.uint8))
    assert torch.equal(scale, stored["layers.1.engram.embed.scale"].view(torch.uint8))
    rows = model.get_submodule("layers.1.engram.embed")(torch.tensor([[0, 1, 2]]), torch.float32)
    assert torch.equal(rows, decode_rows(codes[:3], scale[:3]).flatten()[None])


def table_of(model, layer):
    return model.get_buffer(f"layers.{layer}.engram.embed.weight"), model.get_buffer(
        f"layers.{layer}.engram.embed.scale"
    )


def test_token_map_is_installed(model):
    assert model.ngram.token_map.dtype == torch.int64
    assert model.ngram.token_map.tolist() == [i % 256 for i in range(512)]


def test_progress_counts_every_byte_but_the_tables():
    calls = []
    load_checkpoint(nano_directory(), "exact32", progress=lambda *call: calls.append(call))
    done = [c[0] for c in calls]
    assert done == sorted(done)
    assert calls[-1][0] == calls[-1][1] == Checkpoint.open(nano_directory()).data_bytes()
    assert not any("embed.scale" in c[2] for c in calls)


def test_single_file_and_shards_give_the_same_model(tmp_path, model):
    single = load_checkpoint(edited_nano(tmp_path / "single", lambda tensors: None), "exact32")
    assert all(torch.equal(a, b) for a, b in zip(single.parameters(), model.parameters(), strict=True))


def test_threads_are_restored():
    before = torch.get_num_threads()
    load_checkpoint(nano_directory(), "exact32")
    assert torch.get_num_threads() == before


def flip_scale(tensors, byte):
    """Give one tile another scale; the tile holds the smallest E4M3 code and a larger one."""
    tensors[f"{WQ_A}.scale"].view(torch.uint8)[0, 1] = byte
    tensors[f"{WQ_A}.weight"].view(torch.uint8)[0, 32:34] = torch.tensor([1, 0x70], dtype=torch.uint8)


BROKEN = {
    "missing scale": (lambda t: t.pop(f"{WQ_A}.scale"), f"{WQ_A}.scale, the block scales of {WQ_A}.weight, is missing"),
    "missing expert scale": (lambda t: t.pop(f"{EXPERT}.scale"), rf"{EXPERT}.scale, .* is missing, expected F8_E8M0"),
    "missing tensor": (lambda t: t.pop("norm.weight"), r"norm.weight is missing, expected BF16 \[64\]"),
    "unknown name": (lambda t: t.update(extra=torch.ones(2)), "extra is no tensor of this model"),
    "name of another layout": (
        lambda t: t.update({f"{WQ_A}.weight_scale_inv": t.pop(f"{WQ_A}.scale")}),
        f"{WQ_A}.weight_scale_inv is no tensor of this model",
    ),
    "wrong shape": (
        lambda t: t.update({"norm.weight": torch.ones(65, dtype=torch.bfloat16)}),
        r"norm.weight has shape \[65\], expected \[64\]",
    ),
    "transposed": (
        lambda t: t.update({f"{EXPERT}.weight": t[f"{EXPERT}.weight"].T.contiguous()}),
        rf"{EXPERT}.weight has shape \[16, 64\], expected \[64, 16\]",
    ),
    "wrong dtype": (
        lambda t: t.update({"norm.weight": torch.ones(64)}),
        "norm.weight is F32, expected BF16",
    ),
    "scales as floats": (
        lambda t: t.update({f"{WQ_A}.scale": torch.ones(1, 2)}),
        f"{WQ_A}.scale is F32, expected F8_E8M0",
    ),
    "multiplied out": (
        lambda t: t.update({f"{WQ_A}.weight": torch.ones(32, 64, dtype=torch.bfloat16)}),
        f"{WQ_A}.weight is BF16, expected F8_E4M3; .* opened with plain=True",
    ),
    "several": (lambda t: [t.pop("norm.weight"), t.pop("head.weight")], r"\(and 1 more differences from the config\)"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_broken_contents_are_refused_from_the_headers(tmp_path, monkeypatch, what):
    edit, message = BROKEN[what]
    directory = edited_nano(tmp_path / "broken", edit)
    monkeypatch.setattr(checkpoint_module, "read_tensor", forbidden)
    monkeypatch.setattr(checkpoint_module, "aligned_empty", forbidden)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_checkpoint(directory, "native")
    assert str(directory) in str(caught.value)
    assert "\n" not in str(caught.value)


def forbidden(*args, **kwargs):
    raise AssertionError("data was touched before the headers were checked")


def test_truncated_shard(tmp_path, monkeypatch):
    directory = copy_nano(tmp_path / "nano")
    shard = next(directory.glob("model-*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-100])
    monkeypatch.setattr(checkpoint_module, "aligned_empty", forbidden)
    with pytest.raises(CheckpointError, match=rf"{shard}: truncated: \S+ ends at byte \d+, the file has \d+"):
        load_checkpoint(directory, "native")


def test_missing_shard(tmp_path):
    directory = copy_nano(tmp_path / "nano")
    shard = next(directory.glob("model-*.safetensors"))
    shard.unlink()
    with pytest.raises(CheckpointError, match=f"{shard}: no such shard"):
        load_checkpoint(directory, "native")


def test_path_traversal_in_the_index(tmp_path):
    directory = copy_nano(tmp_path / "nano")
    shutil.copy(next(directory.glob("model-*.safetensors")), tmp_path / "outside.safetensors")
    edit_index(directory, lambda m: m.update({"norm.weight": "../outside.safetensors"}))
    with pytest.raises(CheckpointError, match=r"norm\.weight is in '\.\./outside\.safetensors'"):
        load_checkpoint(directory, "native")


def test_scale_byte_255_is_refused_by_name(tmp_path):
    directory = edited_nano(tmp_path / "nan", lambda t: flip_scale(t, 255))
    with pytest.raises(CheckpointError, match=rf"{SINGLE_NAME}: {WQ_A}.scale contains scale byte 255"):
        load_checkpoint(directory, "native")


def test_scales_that_leave_bf16_are_refused_by_name(tmp_path):
    for byte in (0, 254):
        directory = edited_nano(tmp_path / str(byte), lambda t, byte=byte: flip_scale(t, byte))
        with pytest.raises(CheckpointError, match=f"{WQ_A}.scale contains a scale so extreme"):
            load_checkpoint(directory, "native")


def test_a_file_that_shrinks_after_opening(tmp_path):
    directory = edited_nano(tmp_path / "nano", lambda t: None)
    opened = Checkpoint.open(directory)
    (directory / SINGLE_NAME).write_bytes((directory / SINGLE_NAME).read_bytes()[:100_000])
    last = max(opened.extents.values(), key=lambda e: e.offset)
    with pytest.raises(CheckpointError, match=f"ends inside {last.name}"):
        opened.stored(last.name)


@pytest.mark.parametrize(
    ("token_map", "message"),
    [
        (None, f"neither {TOKEN_MAP_NAME} nor {TOKENIZER_NAME}"),
        (torch.zeros(511, dtype=torch.int32), r"\[511\], expected integers of length vocab_size = 512"),
        (torch.full((512,), 256, dtype=torch.int32), r"token_map\[0\] is 256, outside"),
        (torch.full((512,), -1, dtype=torch.int32), r"token_map\[0\] is -1, outside"),
        (torch.zeros(512), "token_map is F32, expected I32"),
        ("other name", "token_map is missing, expected I32"),
    ],
)
def test_token_map_faults_come_before_the_weights(tmp_path, monkeypatch, token_map, message):
    directory = copy_nano(tmp_path / "nano")
    (directory / TOKENIZER_NAME).unlink()
    (directory / TOKEN_MAP_NAME).unlink()
    if token_map is not None:
        named = ("other", torch.zeros(1)) if isinstance(token_map, str) else ("token_map", token_map)
        (directory / TOKEN_MAP_NAME).write_bytes(b"".join(safetensors_bytes([named])))
    monkeypatch.setattr(checkpoint_module, "aligned_empty", forbidden)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_checkpoint(directory, "native")
    assert str(directory) in str(caught.value)


def test_missing_and_broken_config(tmp_path):
    directory = copy_nano(tmp_path / "nano")
    (directory / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not JSON"):
        load_checkpoint(directory, "native")
    (directory / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"config\.json: no such file"):
        load_checkpoint(directory, "native")


def test_no_directory_and_empty_directory(tmp_path):
    with pytest.raises(CheckpointError, match="absent: not a directory"):
        load_checkpoint(tmp_path / "absent", "native")
    with pytest.raises(CheckpointError, match=f"neither {INDEX_NAME} nor {SINGLE_NAME}"):
        load_checkpoint(tmp_path, "native")


CASES = sorted(p.name for p in GOLDEN.iterdir() if p.is_dir())


@pytest.mark.parametrize("case", CASES)
def test_golden_checkpoints_open_and_load(case):
    token_map = torch.tensor(json.loads((GOLDEN / case / "inputs.json").read_text())["token_map"])
    loaded = load_checkpoint(GOLDEN / case / "weights.safetensors", "exact32", token_map=token_map)
    assert all(p.isfinite().all() for p in loaded.parameters())
    with safe_open(GOLDEN / case / "weights.safetensors", "pt") as file:
        assert torch.equal(loaded.embed.weight, file.get_tensor("embed.weight").float())
    assert torch.equal(loaded.ngram.token_map, token_map)


@pytest.mark.parametrize("case", [c for c in CASES if (GOLDEN / c / "weights_plain.safetensors").exists()])
def test_multiplied_out_form_gives_the_same_model(case):
    token_map = torch.tensor(json.loads((GOLDEN / case / "inputs.json").read_text())["token_map"])
    stored = load_checkpoint(GOLDEN / case / "weights.safetensors", "exact32", token_map=token_map)
    plain = load_checkpoint(GOLDEN / case / "weights_plain.safetensors", "exact32", token_map=token_map, plain=True)
    assert all(torch.equal(a, b) for a, b in zip(stored.parameters(), plain.parameters(), strict=True))
    for layer in stored.config.engram_layer_ids:
        assert torch.equal(decode_rows(*table_of(stored, layer)), decode_rows(*table_of(plain, layer)))
