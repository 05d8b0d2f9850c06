"""Weights that exist in memory only, written as a checkpoint in the published layout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from precede.lowering.manifest import config_values
from precede.model.checkpoint import TOKEN_MAP_BUFFER, Checkpoint
from precede.model.config import ModelConfig
from precede.model.errors import CheckpointError
from precede.model.transformer import Transformer
from precede.model.writer import model_tensors, write_checkpoint

_ROPE = {
    "rope_factor": "factor",
    "rope_original_max_position": "original_max_position_embeddings",
    "rope_beta_fast": "beta_fast",
    "rope_beta_slow": "beta_slow",
}


def config_json(config: ModelConfig) -> dict[str, Any]:
    """A config.json, flat but for `rope_scaling`, that reads back as `config`."""
    values = config_values(config)
    rope = {key: values.pop(name) for name, key in _ROPE.items()}
    return {**values, "rope_scaling": {"rope_type": "yarn", **rope}}


def checkpoint_writer(model: Transformer) -> Callable[[Path], None]:
    """A function that writes `model` into a folder as a checkpoint, with its token map.

    The function raises CheckpointError for a weight that the published formats (FP8, FP4, BF16) cannot hold exactly:
    an engine must not compute with other weights than the model it was made from.
    """

    def write(folder: Path) -> None:
        token_map = dict(model.named_buffers()).get(TOKEN_MAP_BUFFER)
        files = {}
        if token_map is not None:
            files["engram_token_map.safetensors"] = save({"token_map": token_map.to(torch.int32).cpu().contiguous()})
        write_checkpoint(folder, model_tensors(model, model.config), config_json(model.config), files=files)
        check_same(Checkpoint.open(folder), model)

    return write


def check_same(checkpoint: Checkpoint, model: Transformer) -> None:
    """Raise CheckpointError naming the first weight of `model` that differs from the checkpoint's decoded value."""
    parameters = dict(model.named_parameters())
    for spec in checkpoint.weights():
        if spec.kind == "table":
            continue
        ours = parameters[str(spec.target)].detach()
        ours = ours if spec.expert is None else ours[spec.expert]
        if not torch.equal(checkpoint.decoded(spec.name).to(ours.dtype), ours.cpu()):
            raise CheckpointError(
                f"{spec.target}: its values have no exact {spec.dtype} form with block scales; quantise it first, "
                "or save a model that was loaded from a checkpoint"
            )
