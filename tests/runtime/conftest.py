"""What the runtime's tests share."""

import pytest
from tokenizers import Tokenizer as Inner
from tokenizers import decoders, models, pre_tokenizers

from precede.runtime.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def tiny_tokenizer() -> Tokenizer:
    """One token a byte, ids 100 to 355."""
    vocab = {c: 100 + i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    inner = Inner(models.BPE(vocab=vocab, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    return Tokenizer(inner)
