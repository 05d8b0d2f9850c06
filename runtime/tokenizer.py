"""Text to token ids and back, from the tokenizer.json of a checkpoint or an engine folder.

The tokenizers of this family are byte-level: every token stands for bytes, and only a run of tokens is sure to be
UTF-8. So text is decoded from bytes, and a streaming reader holds back the bytes of a character that is not complete.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from precede.model.errors import PrecedeError

if TYPE_CHECKING:
    import tokenizers


class TokenizerError(PrecedeError):
    """A tokenizer.json that is missing, unreadable, or of another kind."""


class Tokenizer:
    """Encodes text and decodes ids; ids that stand for no token decode to nothing."""

    def __init__(self, inner: tokenizers.Tokenizer, source: str = "tokenizer") -> None:
        from tokenizers import decoders

        if not isinstance(inner.decoder, decoders.ByteLevel):
            kind = type(inner.decoder).__name__
            raise TokenizerError(f"{source}: the decoder is {kind}, expected ByteLevel; use a byte-level tokenizer")
        self._inner = inner
        self._special = {i for i, token in inner.get_added_tokens_decoder().items() if token.special}

    @classmethod
    def from_file(cls, path: str | Path) -> Tokenizer:
        """Read a tokenizer.json. Raises TokenizerError if the file is missing or not one."""
        from tokenizers import Tokenizer as Inner

        path = Path(path)
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise TokenizerError(f"{path}: no such file; text prompts need it, token ids work without") from None
        except (OSError, UnicodeDecodeError) as error:
            raise TokenizerError(f"{path}: cannot be read: {error}") from None
        try:
            inner = Inner.from_str(text)
        except Exception as error:  # the library raises bare Exception for every malformed file
            raise TokenizerError(f"{path}: not a tokenizer.json: {error}") from None
        return cls(inner, str(path))

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, with what the tokenizer itself adds (such as a first token).

        Raises TokenizerError for a text with surrogates, which stand for bytes that were no UTF-8.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise TokenizerError(
                f"the text cannot be written as UTF-8: character {error.start} is {text[error.start]!r}"
            ) from None
        return self._inner.encode(text).ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `ids`; bytes that are not UTF-8 read as U+FFFD."""
        data = b"".join(self.token_bytes(i, skip_special_tokens=skip_special_tokens) for i in ids)
        return data.decode("utf-8", errors="replace")

    def token_bytes(self, token: int, *, skip_special_tokens: bool = True) -> bytes:
        """The bytes that one token stands for."""
        if skip_special_tokens and token in self._special:
            return b""
        name = self._inner.id_to_token(token)
        if name is None:
            return b""
        try:
            return bytes(self._alphabet[c] for c in name)
        except KeyError:
            return name.encode()

    @cached_property
    def _alphabet(self) -> dict[str, int]:
        """Byte-level names: printable Latin-1 stands for itself, the other bytes for U+0100 on, in order."""
        printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        others = [b for b in range(256) if b not in set(printable)]
        return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


class Detokenizer:
    """Text of one output as its tokens arrive; never half a character, never part of a stop string.

    `push` and `flush` return the text that has become final; `stopped` is the stop string that was found.
    """

    def __init__(self, tokenizer: Tokenizer, *, stop: Sequence[str] = (), skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._stop = tuple(stop)
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""
        self.stopped: str | None = None

    def push(self, token: int, *, may_stop: bool = True) -> str:
        """Take the next token. `may_stop` False: stop strings that end in it are ordinary text."""
        text = self._utf8.decode(self._tokenizer.token_bytes(token, skip_special_tokens=self._skip))
        return self._release(text, may_stop=may_stop)

    def flush(self) -> str:
        """The rest, at the end of the output: held text, and U+FFFD for bytes that never became a character."""
        if self.stopped is not None:
            return ""
        text = self._release(self._utf8.decode(b"", final=True), may_stop=True)
        if self.stopped is None:
            text, self._held = text + self._held, ""
        return text

    def _release(self, text: str, *, may_stop: bool) -> str:
        if self.stopped is not None:
            return ""
        text = self._held + text
        found = [(text.find(s), s) for s in self._stop if s in text] if may_stop else []
        if found:
            place, self.stopped = min(found)
            self._held = ""
            return text[:place]
        keep = self._held_length(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _held_length(self, text: str) -> int:
        """Length of the longest end of `text` that a stop string begins with."""
        longest = max((len(s) - 1 for s in self._stop), default=0)
        return next(
            (n for n in range(min(longest, len(text)), 0, -1) if any(s.startswith(text[-n:]) for s in self._stop)), 0
        )
