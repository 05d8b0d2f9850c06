"""Golden cases: how to run one, and what its numbers mean (tests/golden/data/README.md)."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from precede.model.batch import StepBatch, StepRequest
from precede.model.cache import CacheLayout, Caches, allocate
from precede.model.checkpoint import load_checkpoint
from precede.model.config import ModelConfig
from precede.model.numerics import Numerics
from precede.model.transformer import Transformer

MODES = {
    "exact": Numerics(compute="float32", kv_quant=False, act_quant=False),
    "kvq": Numerics(compute="float32", kv_quant=True, act_quant=False),
    "full": Numerics(compute="float32", kv_quant=True, act_quant=True),
    "bf16": Numerics(compute="bfloat16", kv_quant=True, act_quant=True),
    "bf16_plain": Numerics(compute="bfloat16", kv_quant=False, act_quant=False),
}

LOGITS, LOGITS_ON_GPU = 2e-4, 1e-3

Forward = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Case:
    """One directory of golden data."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @cached_property
    def config(self) -> ModelConfig:
        return ModelConfig.from_file(self.path / "config.json")

    @cached_property
    def inputs(self) -> dict[str, Any]:
        return json.loads((self.path / "inputs.json").read_text())

    @property
    def prompts(self) -> list[list[int]]:
        return self.inputs["input_ids"]

    def modes(self) -> list[str]:
        return [m for m in MODES if (self.path / f"expected_{m}.safetensors").exists()]

    def expected(self, mode: str) -> dict[str, torch.Tensor]:
        return load_file(self.path / f"expected_{mode}.safetensors")

    def model(self, mode: str, device: str = "cpu") -> Transformer:
        plain = mode == "bf16_plain"
        return load_checkpoint(
            self.path / ("weights_plain.safetensors" if plain else "weights.safetensors"),
            MODES[mode],
            config=self.config,
            token_map=torch.tensor(self.inputs["token_map"]),
            plain=plain,
            device=device,
        )


def find_cases(directories: list[Path]) -> list[Case]:
    """Every case under the directories; one without cases is an error."""
    cases: list[Case] = []
    for directory in directories:
        found = [Case(p.parent) for p in sorted(directory.glob("*/inputs.json"))]
        if not found:
            raise FileNotFoundError(f"{directory} holds no golden case (a folder with inputs.json)")
        cases += found
    return cases


class Sequences:
    """Several sequences that advance through one model together, on pages and rings of their own."""

    def __init__(self, forward: Forward, layout: CacheLayout, prompts: list[list[int]], device: str = "cpu") -> None:
        self.forward, self.layout, self.prompts, self.device = forward, layout, prompts, device
        per = -(-max(map(len, prompts)) // layout.page_size)
        self.pages = [list(range(1 + i * per, 1 + (i + 1) * per)) for i in range(len(prompts))]
        self.caches: Caches = allocate(layout, pages=1 + per * len(prompts), rings=1 + len(prompts), device=device)

    def step(self, start: int, end: int, *, taps: dict[str, Any] | None = None, **fields: Any) -> torch.Tensor:
        """Positions start .. end - 1 of every sequence; logits [B, rows, V] of the wanted rows."""
        requests = [
            StepRequest(
                token_ids=ids[:end], start=start, pages=self.pages[i], ring=i + 1, **{"logits": "all", **fields}
            )
            for i, ids in enumerate(self.prompts)
        ]
        batch = StepBatch.of(requests, self.layout, device=self.device)
        logits = self.forward(batch, self.caches, **({} if taps is None else {"taps": taps})).cpu()
        return logits.unflatten(0, (len(requests), -1))

    def decode(self, start: int, end: int) -> torch.Tensor:
        """One token at a time; logits [B, end - start, V]."""
        return torch.cat([self.step(p, p + 1) for p in range(start, end)], dim=1)


class Runner:
    """One loaded model of a case and mode, with fresh sequences on demand."""

    def __init__(self, case: Case, mode: str, device: str = "cpu") -> None:
        self.case, self.mode, self.device = case, mode, device
        self.expected = case.expected(mode)
        self.model = case.model(mode, device)
        self.layout = CacheLayout.of(case.config, self.model.numerics, page_size=16)
        self.model.set_layout(self.layout)
        self.forward: Forward = self.model
        self.close: list[torch.Tensor] = []

    def sequences(self, *, replay: bool = False) -> Sequences:
        return Sequences(self.model.replay if replay else self.forward, self.layout, self.case.prompts, self.device)


def check(runner: Runner, got: torch.Tensor, name: str) -> None:
    """Compare logits [..., V] by the rule of the mode.

    kvq and full are judged by rows, all rows that the runner has seen together: one value that falls on the other side
    of a rounding boundary on another processor moves a row, and a prompt's tail has only a handful.
    """
    want = runner.expected[name]
    assert got.shape == want.shape
    assert torch.isfinite(got).all()
    difference = (got - want).abs()
    if runner.mode == "exact":
        limit = LOGITS if runner.device == "cpu" else LOGITS_ON_GPU
        assert difference.max() <= limit, f"{name}: {difference.max():.2e}"
    elif runner.mode in ("kvq", "full"):
        runner.close.append((difference.amax(-1) <= 1e-3).flatten().float())
        close = torch.cat(runner.close).mean()
        assert close >= 0.95, f"{name}: up to here only {close:.1%} of the rows within 1e-3"
    elif runner.mode == "bf16_plain":
        assert difference.mean() <= 0.02, name
        assert difference.max() <= 0.15, name
    else:
        cosine = torch.cosine_similarity(got.flatten(0, -2), want.flatten(0, -2), dim=-1)
        assert difference.mean() <= 0.10, name
        assert difference.max() <= 0.65, name
        assert cosine.min() >= 0.97, name
