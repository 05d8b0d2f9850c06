"""Synthetic checkpoints: random weights of any config in the published layout, with tokenizer and token map.

Values are those of a network at rest: linears N(0, 1/in), unit embeddings, norms around 1, coefficients whose mixing
matrix starts near the identity. Each tensor has its own generator, seeded by (seed, name), so a tensor's bytes depend
neither on the order of writing nor on the other tensors.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .config import PRESETS, ModelConfig, preset_json, read_json_object
from .errors import CheckpointError
from .table import TableRow, TensorSpec, table_rows, tensor_table
from .tokenizer import synthetic_tokenizer
from .tokens import TOKEN_MAP_NAME, TOKENIZER_NAME
from .writer import Named, check_target, safetensors_bytes, stored_form, write_checkpoint

# Generated whole in fp32, so a tensor may not be larger than a workstation's memory.
LARGEST_TENSOR = 1 << 31

SKIPPED_TENSORS = (
    "mtp.0.attn_norm.weight",
    "vision.norm.weight",
    "aligner.w1.bias",
    "image_start",
    "image_end",
    "image_newline",
)


def init_checkpoint(
    config: str | Path | Mapping[str, Any],
    directory: str | Path,
    seed: int = 0,
    *,
    overwrite: bool = False,
    progress: Callable[[int, int, str], None] | None = None,
) -> None:
    """Write a random checkpoint of `config`: a preset's name, a config file, or its parsed JSON.

    The same config and seed give the same bytes. `progress` is called with (bytes done, bytes in all, tensor name).
    Raises ConfigError for a config that is wrong or whose vocabulary is too small for a tokenizer, CheckpointError
    for a target that cannot be written.
    """
    if isinstance(config, Mapping):
        data, source = dict(config), "config"
    elif str(config) in PRESETS:
        data, source = preset_json(str(config)), f"preset {config}"
    else:
        data, source = read_json_object(Path(config)), str(config)
    model_config = ModelConfig.from_dict(data, source=source)
    directory = Path(directory).absolute()
    check_target(directory, overwrite=overwrite)
    _check_size(table_rows(model_config), directory)
    table = tensor_table(model_config)
    files = {
        TOKENIZER_NAME: synthetic_tokenizer(model_config).to_str(pretty=True).encode(),
        TOKEN_MAP_NAME: b"".join(safetensors_bytes([("token_map", _token_map(model_config))])),
    }
    tensors = _random_tensors(model_config, table, seed, progress)
    write_checkpoint(directory, tensors, data, files=files, overwrite=overwrite)


def random_values(spec: TensorSpec, config: ModelConfig, seed: int) -> torch.Tensor:
    """fp32 initial values of one weight, of spec.value_shape; a function of seed and name alone."""
    digest = hashlib.sha256(f"{seed}:{spec.name}".encode()).digest()
    generator = np.random.default_rng(np.frombuffer(digest, dtype=np.uint32))
    shape, leaf = spec.value_shape, spec.name.rpartition(".")[2]

    def normal(*size: int) -> np.ndarray:
        return generator.standard_normal(size, dtype=np.float32)

    if spec.name.endswith("norm.weight") or leaf in ("q_weight", "k_weight"):
        values = 1.0 + 0.1 * normal(*shape)
    elif leaf in ("hc_attn_scale", "hc_ffn_scale"):
        values = np.ones(shape, dtype=np.float32)
    elif leaf in ("hc_attn_base", "hc_ffn_base"):
        m = config.hc_mult
        comb = 2.0 * np.eye(m, dtype=np.float32).reshape(-1)
        values = np.concatenate([0.5 * normal(m), np.zeros(m, dtype=np.float32), comb])
    elif leaf in ("bias", "bias_vl"):
        values = generator.uniform(-0.2, 0.2, shape).astype(np.float32)
    elif leaf == "attn_sink" or spec.name == "embed.weight" or spec.kind == "table":
        values = normal(*shape)
    else:
        values = normal(*shape) * np.float32(shape[-1] ** -0.5)
    return torch.from_numpy(values)


def _random_tensors(
    config: ModelConfig,
    table: Mapping[str, TensorSpec],
    seed: int,
    progress: Callable[[int, int, str], None] | None,
) -> Iterator[Named]:
    done, total = 0, sum(s.nbytes for s in table.values())
    for spec in table.values():
        if spec.is_scale:
            continue
        for name, tensor in stored_form(spec, random_values(spec, config, seed)):
            done += tensor.nbytes
            yield name, tensor
        if progress is not None:
            progress(done, total, spec.name)
    for name in SKIPPED_TENSORS:
        yield name, torch.zeros(config.hidden_size, dtype=torch.bfloat16)


def _token_map(config: ModelConfig) -> torch.Tensor:
    return torch.arange(config.vocab_size, dtype=torch.int32) % config.engram_compressed_vocab_size


def _check_size(rows: Sequence[TableRow], directory: Path) -> None:
    """Judged by rows, because a config may ask for more tensors than a table could list."""
    for row in rows:
        if prod(row.shape) * (2 if row.kind == "fp4" else 1) > LARGEST_TENSOR:
            raise CheckpointError(f"{directory}: {row.name} {list(row.shape)} is too large to be synthesised")
    existing = next(p for p in (directory, *directory.parents) if p.is_dir())
    needed = sum(row.total_bytes for row in rows)
    if needed > (free := shutil.disk_usage(existing).free):
        raise CheckpointError(f"{directory}: needs {needed / 1e9:.1f} GB, the disk has {free / 1e9:.1f} GB free")
