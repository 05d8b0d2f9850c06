"""Bytes, characters and stop strings."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Inner

from precede.runtime.tokenizer import Detokenizer, Tokenizer, TokenizerError


def build() -> Inner:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {c: i for i, c in enumerate(alphabet)} | {"he": 256, "Ġhe": 257}
    inner = Inner(models.BPE(vocab=vocab, merges=[("h", "e"), ("Ġ", "he")]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken("<｜end｜>", special=True)])
    inner.add_tokens([AddedToken("<tool call>", special=False)])
    return inner


INNER = build()
TOKENIZER = Tokenizer(INNER)
END, TOOL = 258, 259


def pushed(detokenizer: Detokenizer, ids) -> list[str]:
    return [detokenizer.push(i) for i in ids] + [detokenizer.flush()]


@settings(max_examples=60, deadline=None)
@given(st.text())
def test_text_survives(text):
    ids = TOKENIZER.encode(text) if text else []
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == text
    assert "".join(pushed(Detokenizer(TOKENIZER), ids)) == TOKENIZER.decode(ids)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, TOOL), max_size=30), st.booleans())
def test_any_ids_decode_as_the_library_does(ids, skip):
    expected = INNER.decode(ids, skip_special_tokens=skip)
    assert TOKENIZER.decode(ids, skip_special_tokens=skip) == expected
    assert "".join(pushed(Detokenizer(TOKENIZER, skip_special_tokens=skip), ids)) == expected


def test_surrogates_are_refused():
    with pytest.raises(TokenizerError, match=r"cannot be written as UTF-8: character 1 is '\\ud800'"):
        TOKENIZER.encode("a\ud800")


def test_characters_arrive_whole():
    ids = TOKENIZER.encode("é🙂")
    assert pushed(Detokenizer(TOKENIZER), ids) == ["", "é", "", "", "", "🙂", ""]
    assert pushed(Detokenizer(TOKENIZER), ids[:4]) == ["", "é", "", "", "\ufffd"]


def test_special_tokens_are_left_out_or_shown():
    assert TOKENIZER.decode([END, 256, TOOL]) == "he<tool call>"
    assert TOKENIZER.decode([END, 256], skip_special_tokens=False) == "<｜end｜>he"


def test_ids_without_a_token_are_nothing():
    assert TOKENIZER.decode([256, 100000]) == "he"


@pytest.mark.parametrize(
    ("text", "stop", "expected", "found"),
    [
        ("one two three", ("two",), "one ", "two"),
        ("one two three", ("three", "two th"), "one ", "two th"),
        ("one twin", ("two",), "one twin", None),
        ("one tw", ("two",), "one tw", None),
        ("aab", ("ab",), "a", "ab"),
        ("x🙂y", ("🙂",), "x", "🙂"),
        ("abcabd", ("abd", "zz"), "abc", "abd"),
    ],
)
def test_stop_strings_across_tokens(text, stop, expected, found):
    detokenizer = Detokenizer(TOKENIZER, stop=stop)
    pieces = pushed(detokenizer, TOKENIZER.encode(text))
    assert "".join(pieces) == expected
    assert detokenizer.stopped == found


def test_no_part_of_a_stop_string_is_shown_before_it_is_decided():
    detokenizer = Detokenizer(TOKENIZER, stop=("stop",))
    assert [detokenizer.push(i) for i in TOKENIZER.encode("a st")] == ["a", " ", "", ""]
    assert detokenizer.push(TOKENIZER.encode("x")[0]) == "stx"


def test_stop_strings_before_min_tokens_are_text():
    detokenizer = Detokenizer(TOKENIZER, stop=("b",))
    a, b = TOKENIZER.encode("ab")
    assert detokenizer.push(b, may_stop=False) == "b"
    assert detokenizer.push(a) == "a"
    assert detokenizer.push(b) == ""
    assert detokenizer.stopped == "b"
    assert detokenizer.push(a) == ""
    assert detokenizer.flush() == ""


def test_broken_files(tmp_path):
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: no such file"):
        Tokenizer.from_file(tmp_path / "tokenizer.json")
    (tmp_path / "a.json").write_text("{")
    with pytest.raises(TokenizerError, match=r"a\.json: not a tokenizer\.json"):
        Tokenizer.from_file(tmp_path / "a.json")
    (tmp_path / "b.json").write_bytes(b"\xff\xfe")
    with pytest.raises(TokenizerError, match=r"b\.json: cannot be read"):
        Tokenizer.from_file(tmp_path / "b.json")
    data = json.loads(INNER.to_str())
    data["decoder"] = None
    (tmp_path / "c.json").write_text(json.dumps(data))
    with pytest.raises(TokenizerError, match="expected ByteLevel"):
        Tokenizer.from_file(tmp_path / "c.json")
    INNER.save(str(tmp_path / "d.json"))
    assert Tokenizer.from_file(tmp_path / "d.json").encode("he") == [256]
