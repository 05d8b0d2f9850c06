"""Bytes of a checkpoint as tensors: read into fresh storage, or memory-mapped where a table is larger than memory."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from .errors import CheckpointError
from .shards import Extent

TORCH_DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.uint8,  # scales are bytes: a numeric copy would destroy them
    "I8": torch.int8,
    "I32": torch.int32,
}

ALIGNMENT = 64


def aligned_empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
    """An uninitialised tensor whose first byte is 64-byte aligned; a product may round by how its operands lie."""
    tensor = torch.empty(tuple(shape), dtype=dtype, device=device)
    if tensor.data_ptr() % ALIGNMENT == 0:
        return tensor
    room = torch.empty(tensor.nbytes + ALIGNMENT, dtype=torch.uint8, device=device)
    start = -room.data_ptr() % ALIGNMENT
    return room[start : start + tensor.nbytes].view(dtype).view(tuple(shape))


def read_tensor(extent: Extent) -> torch.Tensor:
    """A copy of a stored tensor in aligned storage, scales as uint8. Raises CheckpointError if the file ends early."""
    tensor = aligned_empty(extent.shape, TORCH_DTYPES[extent.dtype])
    view = tensor.view(-1).view(torch.uint8).numpy().data
    try:
        with extent.file.open("rb", buffering=0) as file:
            file.seek(extent.offset)
            got = 0
            while got < extent.nbytes:
                count = file.readinto(view[got:])
                if not count:
                    raise CheckpointError(f"{extent.file}: ends inside {extent.name}; it shrank after it was opened")
                got += count
    except OSError as error:
        raise CheckpointError(f"{extent.file}: {extent.name} cannot be read: {error.strerror}") from None
    return tensor


def map_tensor(extent: Extent) -> torch.Tensor:
    """A stored tensor of one-byte elements, memory-mapped read-only: rows are read from disk when they are gathered."""
    raw = np.memmap(extent.file, dtype=np.uint8, mode="r", offset=extent.offset, shape=(extent.nbytes,))
    with warnings.catch_warnings():
        # torch has no read-only tensors and says so; nothing writes an Engram table, and a write would fault.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        flat = torch.from_numpy(raw)
    return flat.view(TORCH_DTYPES[extent.dtype]).view(extent.shape)


@contextmanager
def one_thread() -> Iterator[None]:
    """Run the block's torch operations on one thread.

    Coding a checkpoint is thousands of operations of a tenth of a millisecond; on a busy machine waiting for a second
    thread at the end of each costs far more than it saves (mini on two shared cores: 123 s against 6).
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
