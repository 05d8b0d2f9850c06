"""Configs and weights that are written along with an engine read back as they were."""

import pytest

from precede.model.checkpoint import load_checkpoint
from precede.model.config import PRESETS, ModelConfig
from precede.model.errors import CheckpointError
from precede.weights import checkpoint_writer, config_json


@pytest.mark.parametrize("name", PRESETS)
def test_config_json_reads_back(name):
    config = ModelConfig.preset(name)
    assert ModelConfig.from_dict(config_json(config)) == config


@pytest.mark.parametrize("numerics", ["exact32", "native"])
def test_a_loaded_model_is_written_as_it_was_stored(numerics, tiny_checkpoint, tmp_path):
    model = load_checkpoint(tiny_checkpoint, numerics).requires_grad_(False)
    checkpoint_writer(model)(tmp_path / "out")
    again = load_checkpoint(tmp_path / "out", numerics)
    ours, theirs = ({**dict(m.named_parameters()), **dict(m.named_buffers())} for m in (model, again))
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype
        assert bool((tensor.float() == theirs[name].float()).all()), name


def test_other_values_are_refused(tiny_checkpoint, tmp_path):
    model = load_checkpoint(tiny_checkpoint, "exact32").requires_grad_(False)
    model.layers[2].ffn.experts.w2[3, 0, 0] += 1e-7  # type: ignore[union-attr, index]
    with pytest.raises(CheckpointError, match=r"layers\.2\.ffn\.experts\.w2: its values have no exact I8 form"):
        checkpoint_writer(model)(tmp_path / "out")
