"""Token compression of the n-gram memory: every token id to the id of its normalised text.

`Bar`, ` bar` with another accent, and `BAR` hash alike. The map comes from `engram_token_map.safetensors` if the
checkpoint has one, else it is built from `tokenizer.json`: ids in order, each decoded alone, normalised, and numbered
by the first appearance of its key. Every hash multiplier depends on the number of keys, so a built map must have
exactly `engram_compressed_vocab_size` of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .config import ModelConfig
from .errors import CheckpointError
from .shards import read_header
from .storage import read_tensor

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKEN_MAP_NAME = "engram_token_map.safetensors"
TOKENIZER_NAME = "tokenizer.json"

_LONE_SPACE = "\ue000"  # stands for a text that is one space while blanks at the ends are stripped


def load_token_map(directory: str | Path, config: ModelConfig) -> torch.Tensor:
    """int64 [vocab_size] of ids < engram_compressed_vocab_size, from the directory's token map or its tokenizer.

    Raises CheckpointError if neither file is there, or if the map does not fit the config.
    """
    stored, tokenizer = Path(directory) / TOKEN_MAP_NAME, Path(directory) / TOKENIZER_NAME
    if stored.exists():
        return check_token_map(_read(stored), config, str(stored))
    if tokenizer.exists():
        return build_token_map(_read_tokenizer(tokenizer), config, str(tokenizer))
    raise CheckpointError(
        f"{directory}: no token map: it holds neither {TOKEN_MAP_NAME} nor {TOKENIZER_NAME} to build one from"
    )


def check_token_map(token_map: torch.Tensor, config: ModelConfig, source: str) -> torch.Tensor:
    """`token_map` as int64 after checking its length and range; `source` names it in the CheckpointError."""
    if token_map.is_floating_point() or tuple(token_map.shape) != (config.vocab_size,):
        raise CheckpointError(
            f"{source}: token_map is {token_map.dtype} {list(token_map.shape)}, expected integers of length "
            f"vocab_size = {config.vocab_size}"
        )
    outside = ((token_map < 0) | (token_map >= config.engram_compressed_vocab_size)).nonzero()
    if len(outside):
        at = int(outside[0])
        raise CheckpointError(
            f"{source}: token_map[{at}] is {int(token_map[at])}, outside engram_compressed_vocab_size = "
            f"{config.engram_compressed_vocab_size}"
        )
    return token_map.to(torch.int64)


def build_token_map(tokenizer: Tokenizer, config: ModelConfig, source: str = "tokenizer") -> torch.Tensor:
    """The map of a tokenizer that defines every id below vocab_size; int64 [vocab_size].

    Raises CheckpointError for an undefined id, or another number of keys than engram_compressed_vocab_size.
    """
    normalizer = _normalizer()
    numbers: dict[str, int] = {}
    mapped: list[int] = []
    for token_id in range(config.vocab_size):
        token = tokenizer.id_to_token(token_id)
        if token is None:
            raise CheckpointError(f"{source}: defines no token {token_id}; vocab_size is {config.vocab_size}")
        text = tokenizer.decode([token_id], skip_special_tokens=False)
        key = token if "\ufffd" in text else normalizer.normalize_str(text) or text
        mapped.append(numbers.setdefault(key, len(numbers)))
    if len(numbers) != config.engram_compressed_vocab_size:
        raise CheckpointError(
            f"{source}: its {config.vocab_size} tokens have {len(numbers)} distinct normalised texts, expected "
            f"engram_compressed_vocab_size = {config.engram_compressed_vocab_size}"
        )
    return torch.tensor(mapped, dtype=torch.int64)


def _read(path: Path) -> torch.Tensor:
    extent = read_header(path).get("token_map")
    if extent is None or extent.dtype != "I32":
        found = "is missing" if extent is None else f"is {extent.dtype}"
        raise CheckpointError(f"{path}: token_map {found}, expected I32")
    return read_tensor(extent)


def _read_tokenizer(path: Path) -> Tokenizer:
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for every fault of the file
        raise CheckpointError(f"{path}: not a tokenizer file: {error}") from None


def _normalizer() -> Any:
    from tokenizers import Regex, normalizers

    return normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex(r"^ $"), _LONE_SPACE),
            normalizers.Strip(),
            normalizers.Replace(_LONE_SPACE, " "),
        ]
    )
