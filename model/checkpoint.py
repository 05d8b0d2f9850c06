"""The published checkpoint layout: opened and checked from headers alone, then decoded into a model.

`Checkpoint.open` compares every name, shape and dtype with the tensor table before a byte of data is read, so a broken
checkpoint costs milliseconds. `load_checkpoint` then builds the model without storage and fills it one tensor at a
time: each parameter gets its own aligned storage in the dtype that the model asks for, holding the exact decoded
value. Engram tables stay on disk, memory-mapped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from .config import ModelConfig
from .contents import check_contents
from .errors import CheckpointError
from .formats import NAN_BYTE, decode_fp4, decode_fp8, decode_rows, encode_rows, exact_bytes
from .numerics import Numerics
from .shards import Extent, find_tensors, read_header
from .storage import aligned_empty, map_tensor, one_thread, read_tensor
from .table import TensorSpec, tensor_table
from .tokens import check_token_map, load_token_map
from .transformer import Transformer

Progress = Callable[[int, int, str], None]

CONFIG_NAME = "config.json"
TOKEN_MAP_BUFFER = "ngram.token_map"


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint whose headers fit its config: what is stored where, and access by name."""

    directory: Path
    config: ModelConfig
    table: dict[str, TensorSpec]
    extents: dict[str, Extent]
    skipped: tuple[str, ...]  # names under a skipped prefix that are there

    @classmethod
    def open(cls, path: str | Path, *, config: ModelConfig | None = None, plain: bool = False) -> Checkpoint:
        """Open a directory (index or single file) or one `.safetensors` file and check all headers.

        `config` defaults to the config.json in the directory. `plain` expects the multiplied-out form: every scaled
        weight stored BF16, without scales. Raises CheckpointError or ConfigError; reads no tensor data.
        """
        path = Path(path)
        single = path.suffix == ".safetensors" and path.is_file()
        extents = read_header(path) if single else find_tensors(path)
        directory = path.parent if single else path
        if config is None:
            config = ModelConfig.from_file(directory / CONFIG_NAME)
        table = tensor_table(config, plain=plain)
        kept = check_contents(table, extents, path)
        skipped = tuple(n for n in extents if n not in kept)
        return cls(directory=directory, config=config, table=table, extents=kept, skipped=skipped)

    def weights(self) -> Iterator[TensorSpec]:
        """Every tensor but the scales, in the order of the files."""
        specs = (s for s in self.table.values() if not s.is_scale)
        return iter(sorted(specs, key=lambda s: (str(self.extents[s.name].file), self.extents[s.name].offset)))

    def stored(self, name: str) -> torch.Tensor:
        """A copy of one tensor as stored; scales as uint8. Raises CheckpointError for a scale byte that means NaN."""
        tensor = read_tensor(self.extents[name])
        if self.table[name].is_scale and bool((tensor == NAN_BYTE).any()):
            raise CheckpointError(f"{self.extents[name].file}: {name} contains scale byte 255, which is NaN")
        return tensor

    def decoded(self, name: str, device: torch.device | str = "cpu") -> torch.Tensor:
        """One weight's values: fp32 for a scaled weight, the stored dtype otherwise; decoded on `device`."""
        spec = self.table[name]
        stored = self.stored(name).to(device)
        if spec.scale_name is None:
            return stored
        scale = self.stored(spec.scale_name)
        decode = {"fp8": decode_fp8, "fp4": decode_fp4, "table": decode_rows}[spec.kind]
        values = decode(stored, scale.to(device))
        low, high = exact_bytes(spec.kind)
        if int(scale.min()) < low or int(scale.max()) > high:
            self._check_exact(spec.scale_name, values)
        return values

    def mapped_table(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes float8_e4m3fn [rows, dim] and scales uint8 [rows, dim/32] of an Engram table.

        Memory-mapped and read-only; bytes are read when rows are gathered, hence not searched for NaN. A table of the
        multiplied-out form is read and encoded again, which changes no value.
        """
        spec = self.table[name]
        if spec.scale_name is not None:
            return map_tensor(self.extents[name]), map_tensor(self.extents[spec.scale_name])
        values = self.stored(name).float()
        codes, scale = encode_rows(values)
        if not torch.equal(decode_rows(codes, scale), values):
            raise CheckpointError(
                f"{self.extents[name].file}: {name} holds values that no E4M3 row with block scales can hold"
            )
        return codes, scale

    def data_bytes(self) -> int:
        """Bytes that loading reads: everything but the Engram tables."""
        return sum(self.extents[s.name].nbytes for s in self.table.values() if s.kind != "table")

    def _check_exact(self, scale_name: str, values: torch.Tensor) -> None:
        if not torch.equal(values.bfloat16().float(), values) or not bool(values.isfinite().all()):
            raise CheckpointError(
                f"{self.extents[scale_name].file}: {scale_name} contains a scale so extreme that its weights are no "
                "finite bf16 numbers"
            )


def load_checkpoint(
    path: str | Path,
    numerics: Numerics | str | Sequence[object],
    *,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
    config: ModelConfig | None = None,
    token_map: torch.Tensor | None = None,
    plain: bool = False,
) -> Transformer:
    """The model of a checkpoint directory (or one `.safetensors` file beside a config.json), ready to run.

    numerics    preset or triple; decides the dtype of every parameter
    progress    called with (bytes done, bytes in all, tensor name) after each tensor
    config      instead of the directory's config.json
    token_map   integers [vocab_size], instead of the directory's token map or tokenizer
    plain       the checkpoint is multiplied out: every scaled weight BF16, no scales

    Parameters come without gradients; `requires_grad_(True)` is the caller's to ask for. Engram tables stay
    memory-mapped on the host, whatever the device. Everything that can be known from headers and
    the token map is checked before the first large allocation. Raises CheckpointError or ConfigError.
    """
    checkpoint = Checkpoint.open(path, config=config, plain=plain)
    config = checkpoint.config
    if token_map is not None and not config.engram_layer_ids:
        raise CheckpointError(f"{path}: a token_map was given, but the config has no engram_layer_ids to use it")
    if token_map is not None:
        token_map = check_token_map(token_map, config, "token_map")
    elif config.engram_layer_ids:
        token_map = load_token_map(checkpoint.directory, config)
    numerics, device = Numerics.of(numerics), torch.device(device)
    weight_dtype = numerics.dtype if device.type == "cuda" else torch.float32
    model = Transformer(config, numerics, device="meta", weight_dtype=weight_dtype)
    with one_thread():
        _fill(model, checkpoint, token_map, device, progress)
    return model.eval().requires_grad_(False)


def _fill(
    model: Transformer,
    checkpoint: Checkpoint,
    token_map: torch.Tensor | None,
    device: torch.device,
    progress: Progress | None,
) -> None:
    """Give every parameter and buffer of a model on `meta` its storage and value; constants only move to `device`."""
    homes = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    filled: dict[str, torch.Tensor] = {}
    if token_map is not None:
        filled[TOKEN_MAP_BUFFER] = token_map.to(device)
    done, total = 0, checkpoint.data_bytes()
    for spec in checkpoint.weights():
        target = str(spec.target)
        if spec.kind == "table":
            filled[target], filled[target.removesuffix("weight") + "scale"] = checkpoint.mapped_table(spec.name)
            continue
        if target not in filled:
            filled[target] = aligned_empty(homes[target].shape, homes[target].dtype, device)
        place = filled[target] if spec.expert is None else filled[target][spec.expert]
        place.copy_(checkpoint.decoded(spec.name, device))
        done += sum(checkpoint.extents[n].nbytes for n in (spec.name, spec.scale_name) if n is not None)
        if progress is not None:
            progress(done, total, spec.name)
    constants = {n: t.to(device) for n, t in homes.items() if n not in filled}
    for name, tensor in (filled | constants).items():
        _install(model, name, tensor)


def _install(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    owner, _, leaf = name.rpartition(".")
    module = model.get_submodule(owner)
    if leaf in module._parameters:
        trained = module._parameters[leaf]
        tensor = torch.nn.Parameter(tensor, requires_grad=trained is not None and trained.requires_grad)
    setattr(module, leaf, tensor)
