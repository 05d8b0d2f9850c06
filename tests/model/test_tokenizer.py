from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from precede.model.config import ModelConfig
from precede.model.errors import ConfigError
from precede.model.tokenizer import BOS, EOS, IMAGE, PAD, SPECIAL_TOKENS, synthetic_tokenizer

CONFIG = ModelConfig.preset("nano")
TOKENIZER = synthetic_tokenizer(CONFIG)


def test_every_id_is_defined_once():
    tokens = [TOKENIZER.id_to_token(i) for i in range(CONFIG.vocab_size)]
    assert None not in tokens
    assert len(set(tokens)) == CONFIG.vocab_size == TOKENIZER.get_vocab_size()


def test_places_of_the_special_tokens():
    wanted = {BOS: 0, EOS: 1, PAD: 2, IMAGE: CONFIG.image_token_id}
    wanted |= {token: 3 + i for i, token in enumerate(SPECIAL_TOKENS)}
    assert {token: TOKENIZER.token_to_id(token) for token in wanted} == wanted
    first_byte = 3 + len(SPECIAL_TOKENS)
    assert TOKENIZER.encode("\x00", add_special_tokens=False).ids == [first_byte]
    assert TOKENIZER.id_to_token(first_byte + 256) == "<unused_0>"


def test_special_tokens_are_single_ids_inside_a_text():
    text = f"{BOS}<｜User｜>Hi<｜Assistant｜></think>"
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    assert ids == [TOKENIZER.token_to_id(t) for t in (BOS, "<｜User｜>", "H", "i", "<｜Assistant｜>", "</think>")]
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == text


@settings(max_examples=200, deadline=None)
@given(st.text())
@example("<unused_0> naïve 日本語 \r\n\t  🙂")
def test_every_text_round_trips_byte_by_byte(text):
    # Hypothesis tries strings that it finds in the code, special tokens among them; those are one id by design.
    assume(not any(token.content in text for token in TOKENIZER.get_added_tokens_decoder().values() if token.special))
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == text
    assert len(ids) == len(text.encode())


def test_image_id_among_the_bytes_and_shared_ids():
    config = replace(CONFIG, image_token_id=100, eos_token_id=2)
    tokenizer = synthetic_tokenizer(config)
    assert tokenizer.id_to_token(100) == IMAGE
    assert tokenizer.id_to_token(2) == EOS  # pad shares it
    assert tokenizer.decode(tokenizer.encode("any text").ids) == "any text"


def test_a_small_vocabulary_is_refused():
    config = replace(CONFIG, vocab_size=272, image_token_id=3, engram_compressed_vocab_size=100)
    with pytest.raises(ConfigError, match=r"vocab_size = 272 is too small .* need 273"):
        synthetic_tokenizer(config)
    assert synthetic_tokenizer(replace(config, vocab_size=273)).id_to_token(272) == "ÿ"
