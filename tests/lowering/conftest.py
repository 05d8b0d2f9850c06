"""A small part and a small engine, made without a model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from precede.lowering.bundle import EngineContents, PartContents, PassContents, write_bundle
from precede.lowering.manifest import PassReport
from precede.lowering.part import PartSpec
from precede.lowering.select import choose_backend, reference_decisions
from precede.lowering.target import resolve_target
from precede.model.cache import CacheLayout
from precede.model.config import ModelConfig, preset_json
from precede.model.numerics import Numerics


@pytest.fixture
def part_data() -> dict[str, Any]:
    """out[T, 4] = weight[token_ids] * positions, as parsed JSON."""
    return {
        "schema": "precede.part/1",
        "name": "main",
        "symbols": {"T": [1, 64]},
        "inputs": [
            {"name": "embed", "role": "weight", "source": "embed.weight", "dtype": "float32", "shape": [10, 4]},
            {"name": "ids", "role": "batch", "source": "batch.token_ids", "dtype": "int64", "shape": ["T"]},
            {"name": "pos", "role": "batch", "source": "batch.positions", "dtype": "int64", "shape": ["T"]},
        ],
        "nodes": [
            _node("rows", "aten.embedding.default", [{"ref": "embed"}, {"ref": "ids"}], shape=["T", 4]),
            _node("col", "aten.unsqueeze.default", [{"ref": "pos"}, 1], dtype="int64", shape=["T", 1]),
            _node("out", "aten.mul.Tensor", [{"ref": "rows"}, {"ref": "col"}], shape=["T", 4]),
        ],
        "outputs": [{"name": "out", "dtype": "float32", "shape": ["T", 4]}],
    }


def _node(name: str, target: str, args: list[Any], *, dtype: str = "float32", shape: list[Any]) -> dict[str, Any]:
    return {"name": name, "target": target, "args": args, "kwargs": {}, "dtype": dtype, "shape": shape, "stream": 0}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A directory with nano's config and one tensor: all that an engine folder looks at."""
    directory = tmp_path / "checkpoint"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(preset_json("nano")))
    (directory / "tokenizer.json").write_text("{}")
    save_file({"embed.weight": torch.arange(40.0).view(10, 4)}, directory / "model.safetensors")
    return directory


def pass_contents(name: str) -> PassContents:
    report = PassReport(
        name=name, numerics="exact", matches=1, expected=1, misses=[], nodes_before=4, nodes_after=3, seconds=0.5
    )
    return PassContents(report=report, ir="after\n", diff="- before\n+ after\n")


@pytest.fixture
def contents(part_data: dict[str, Any], checkpoint: Path) -> Callable[..., EngineContents]:
    """Makes the contents of an engine; keywords replace fields."""

    def make(**changes: Any) -> EngineContents:
        config, numerics = ModelConfig.preset("nano"), Numerics.of("exact32")
        part = PartSpec.parse(part_data)
        backend, decisions = choose_backend("auto", resolve_target("cpu"))
        fields: dict[str, Any] = {
            "target": "cpu",
            "backend": backend,
            "config": config,
            "numerics": numerics,
            "options": {"target": "cpu", "page_size": 16, "numerics": "exact32"},
            "layout": CacheLayout.of(config, numerics, page_size=16),
            "kv_format": "auto",
            "store": "values",
            "parts": [PartContents(spec=part, backend=backend, text="%out = mul(%rows, %col)\n")],
            "passes": [pass_contents("canonicalize")],
            "decisions": [*decisions, *reference_decisions(part)],
            "checkpoint": checkpoint,
        }
        return EngineContents(**{**fields, **changes})

    return make


@pytest.fixture
def engine(tmp_path: Path, contents: Callable[..., EngineContents]) -> Path:
    """A complete engine folder that refers to its checkpoint."""
    path = tmp_path / "engine"
    write_bundle(path, contents())
    return path
