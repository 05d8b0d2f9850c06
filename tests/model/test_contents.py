from __future__ import annotations

from pathlib import Path

import pytest

from precede.model.config import ModelConfig
from precede.model.contents import check_contents
from precede.model.errors import CheckpointError
from precede.model.shards import Extent
from precede.model.table import tensor_table

TABLE = tensor_table(ModelConfig.preset("nano"))
SHARD = Path("dir/shard.safetensors")


def as_stored() -> dict[str, Extent]:
    return {n: Extent(n, s.dtype, s.shape, SHARD, 0, s.nbytes) for n, s in TABLE.items()}


def test_a_fitting_layout_is_returned_without_skipped_tensors():
    extents = as_stored()
    extra = {n: Extent(n, "BF16", (1,), SHARD, 0, 2) for n in ("mtp.0.x", "vision.y", "image_start")}
    assert check_contents(TABLE, extents | extra, Path("dir")) == extents


@pytest.mark.parametrize("name", ["embed.weight", "layers.9.ffn.experts.7.w3.scale", "layers.1.engram.embed.scale"])
def test_every_fault_names_tensor_and_file(name):
    whole = as_stored()
    missing = {n: e for n, e in whole.items() if n != name}
    where = "shard" if name.endswith("scale") else "dir"
    with pytest.raises(CheckpointError, match=rf"{where}.*: {name}.* is missing"):
        check_contents(TABLE, missing, Path("dir"))
    for change, message in (
        (Extent(name, "F64", TABLE[name].shape, SHARD, 0, 0), "is F64, expected"),
        (Extent(name, TABLE[name].dtype, (1, 2), SHARD, 0, 0), r"has shape \[1, 2\], expected"),
    ):
        with pytest.raises(CheckpointError, match=rf"{SHARD}: {name} {message}"):
            check_contents(TABLE, whole | {name: change}, Path("dir"))


def test_a_name_close_to_a_skipped_prefix_is_not_skipped():
    extra = Extent("mtpx.weight", "BF16", (1,), SHARD, 0, 2)
    with pytest.raises(CheckpointError, match=r"mtpx\.weight is no tensor of this model"):
        check_contents(TABLE, as_stored() | {"mtpx.weight": extra}, Path("dir"))
