from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tokenizers import Tokenizer, decoders, models

from precede.model.config import ModelConfig
from precede.model.errors import CheckpointError
from precede.model.tokenizer import synthetic_tokenizer
from precede.model.tokens import TOKEN_MAP_NAME, TOKENIZER_NAME, build_token_map, check_token_map, load_token_map
from precede.model.writer import safetensors_bytes

# Token text, and the group it belongs to: equal groups share a compressed id.
WORDS = [
    ("bar", "bar"),
    ("Bar", "bar"),
    ("BÁR", "bar"),
    (" bar ", "bar"),
    ("bar\n", "bar"),
    ("ﬁx", "fix"),  # NFKC takes ligatures apart
    ("fix", "fix"),
    ("e\u0301", "e"),
    ("É", "e"),
    (" ", "space"),
    ("\t\r\n", "space"),
    ("   ", "space"),
    ("a b", "a b"),
    ("a \n b", "a b"),
    ("ab", "ab"),
    ("\u0301", "accent"),  # normalises to nothing: its own text is the key
    ("\u0302", "other accent"),
    ("\ufffd", "broken"),
    ("\ufffd ", "other broken"),  # undecodable tokens are told apart by their raw string
    ("ß", "eszett"),
]


def word_tokenizer(words: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token=words[0]))
    tokenizer.decoder = decoders.Fuse()  # type: ignore[misc]
    return tokenizer


def word_config(vocabulary: int, compressed: int) -> ModelConfig:
    # The bounds of a config need more ids than these few words; only the two sizes matter here.
    config = ModelConfig.preset("nano")
    object.__setattr__(config, "vocab_size", vocabulary)
    object.__setattr__(config, "engram_compressed_vocab_size", compressed)
    return config


def test_normaliser_groups():
    groups = [g for _, g in WORDS]
    order = list(dict.fromkeys(groups))
    built = build_token_map(word_tokenizer([w for w, _ in WORDS]), word_config(len(WORDS), len(order)))
    assert built.dtype == torch.int64
    assert built.tolist() == [order.index(g) for g in groups]


def test_number_of_keys_must_match():
    with pytest.raises(CheckpointError, match=r"4 tokens have 3 distinct normalised texts, expected .* = 4"):
        build_token_map(word_tokenizer(["a", "A", "b", "c"]), word_config(4, 4), "here")


def test_an_undefined_id_is_named():
    with pytest.raises(CheckpointError, match="defines no token 2; vocab_size is 3"):
        build_token_map(word_tokenizer(["a", "b"]), word_config(3, 3), "here")


def test_special_tokens_and_bytes_of_a_byte_level_tokenizer(tmp_path):
    config = ModelConfig.preset("nano")
    tokenizer = synthetic_tokenizer(config)
    tokenizer.save(str(tmp_path / TOKENIZER_NAME))
    with pytest.raises(CheckpointError, match=r"512 tokens have (\d+) distinct") as caught:
        load_token_map(tmp_path, config)
    assert str(tmp_path / TOKENIZER_NAME) in str(caught.value)
    # 26 capitals fold into small letters; tab, line feed, carriage return and space are one key.
    built = load_token_map(tmp_path, replace(config, engram_compressed_vocab_size=512 - 26 - 3))
    ids = {t: tokenizer.encode(t).ids[0] for t in ("a", "A", " ", "\n", "b")}
    assert built[ids["a"]] == built[ids["A"]]
    assert built[ids[" "]] == built[ids["\n"]]
    assert built[ids["a"]] != built[ids["b"]]
    assert built[2] == 2


def test_the_stored_map_wins_over_the_tokenizer(tmp_path):
    config = ModelConfig.preset("nano")
    (tmp_path / TOKENIZER_NAME).write_text("not read")
    stored = torch.arange(512, dtype=torch.int32) % 7
    (tmp_path / TOKEN_MAP_NAME).write_bytes(b"".join(safetensors_bytes([("token_map", stored)])))
    assert torch.equal(load_token_map(tmp_path, config), stored.long())


def test_faults_name_the_file(tmp_path):
    config = ModelConfig.preset("nano")
    with pytest.raises(CheckpointError, match=f"neither {TOKEN_MAP_NAME} nor {TOKENIZER_NAME}"):
        load_token_map(tmp_path, config)
    (tmp_path / TOKENIZER_NAME).write_text("{}")
    with pytest.raises(CheckpointError, match=f"{TOKENIZER_NAME}: not a tokenizer file"):
        load_token_map(tmp_path, config)
    (tmp_path / TOKEN_MAP_NAME).write_bytes(b"junk")
    with pytest.raises(CheckpointError, match=f"{TOKEN_MAP_NAME}: 4 bytes are too few"):
        load_token_map(tmp_path, config)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (torch.zeros(512), "torch.float32"),
        (torch.zeros(2, 256, dtype=torch.int64), r"\[2, 256\]"),
        (torch.full((512,), 256), r"token_map\[0\] is 256"),
    ],
)
def test_check_token_map(values, message):
    with pytest.raises(CheckpointError, match=message):
        check_token_map(values, ModelConfig.preset("nano"), "given")
