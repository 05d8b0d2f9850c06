"""What the runtime's tests share: a byte tokenizer, a three-layer checkpoint, and one engine compiled from it."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Inner
from tokenizers import decoders, models, pre_tokenizers
from typer.testing import CliRunner, Result

from precede.model.config import preset_json
from precede.runtime.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def tiny_tokenizer() -> Tokenizer:
    """One token a byte, ids 100 to 355."""
    vocab = {c: 100 + i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    inner = Inner(models.BPE(vocab=vocab, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    return Tokenizer(inner)


@pytest.fixture(scope="session")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for what is made once: config.json, checkpoint/, engine/. Tests must not change anything in it."""
    return tmp_path_factory.mktemp("workplace")


@pytest.fixture(scope="session")
def tiny_config(workplace: Path) -> Path:
    """The nano config cut to three layers: window only, ratio 2, ratio 1."""
    data = preset_json("nano")
    text = data["text_config"]
    text |= {
        "num_hidden_layers": 3,
        "compress_ratios": [0, 2, 1],
        "kv_source_layer_ids": [1, 2],
        "index_source_layer_ids": [1, 2],
        "candidate_source_layer_id": 2,
        "engram_layer_ids": [0],
        "engram_num_embeddings": text["engram_num_embeddings"][:1],
        "max_position_embeddings": 64,
    }
    path = workplace / "config.json"
    path.write_text(json.dumps(data))
    return path


@pytest.fixture(scope="session")
def tiny_checkpoint(workplace: Path, tiny_config: Path) -> Path:
    """A checkpoint of the tiny config, made by the command line."""
    invoke("init", tiny_config, "-o", workplace / "checkpoint", "--seed", 3, code=0)
    return workplace / "checkpoint"


@pytest.fixture(scope="session")
def tiny_engine(workplace: Path, tiny_checkpoint: Path) -> Path:
    """An engine of the tiny checkpoint, made by the command line; its JSON report is beside it."""
    options = ("--numerics", "exact32", "--page-size", 16, "--json", workplace / "report.json")
    invoke("compile", tiny_checkpoint, "-o", workplace / "engine", *options, code=0)
    return workplace / "engine"


def invoke(*words: object, code: int) -> Result:
    """Run the command line in this process and check its exit code; a user's fault is one line on stderr."""
    from precede.cli import app

    result = CliRunner().invoke(app, [str(word) for word in words], prog_name="precede")
    assert result.exit_code == code, f"{words}: {result.exit_code}\n{result.output}\n{result.exception!r}"
    if code == 2:
        assert result.stdout == ""
        assert len(result.stderr.splitlines()) == 1
        assert result.stderr.startswith("precede: ")
        assert "Traceback" not in result.stderr
    return result
