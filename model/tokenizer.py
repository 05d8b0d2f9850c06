"""A byte-level tokenizer for synthetic checkpoints: every id below vocab_size means something, every text round-trips.

Ids 0, 1, 2 and the image id are the config's; the family's other special tokens follow, then the 256 bytes, then
fillers `<unused_N>` that no text is encoded to. There are no merges: a token is a byte.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .config import ModelConfig
from .errors import ConfigError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
PAD = "<｜▁pad▁｜>"
IMAGE = "<｜deepseek_image｜>"

SPECIAL_TOKENS = (
    "<｜System｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<think>",
    "</think>",
    "｜DSML｜",
    "<｜latest_reminder｜>",
    "<｜action｜>",
    "<｜query｜>",
    "<｜authority｜>",
    "<｜domain｜>",
    "<｜title｜>",
    "<｜read_url｜>",
)


def synthetic_tokenizer(config: ModelConfig) -> Tokenizer:
    """Build the tokenizer of a vocabulary size. Raises ConfigError if the special tokens and bytes do not fit in."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    fixed = {config.bos_token_id: BOS}
    for token_id, token in (
        (config.eos_token_id, EOS),
        (config.pad_token_id, PAD),
        (config.image_token_id, IMAGE),
    ):
        fixed.setdefault(token_id, token)
    named = [*SPECIAL_TOKENS, *_byte_symbols()]
    free = [i for i in range(config.vocab_size) if i not in fixed]
    if len(free) < len(named):
        raise ConfigError(
            f"vocab_size = {config.vocab_size} is too small for a byte-level tokenizer; "
            f"{len(fixed)} fixed tokens, {len(SPECIAL_TOKENS)} special tokens and 256 bytes need "
            f"{len(fixed) + len(named)}"
        )
    named += [f"<unused_{n}>" for n in range(len(free) - len(named))]
    vocabulary = {token: i for i, token in sorted({**fixed, **dict(zip(free, named, strict=True))}.items())}

    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # type: ignore[misc]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[misc]
    specials = [*fixed.values(), *SPECIAL_TOKENS]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in specials])
    return tokenizer


def _byte_symbols() -> list[str]:
    """The printable characters by which byte-level tokenizers write bytes 0 .. 255."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(b) if b in printable else chr(next(others)) for b in range(256)]
