"""A small model of the problem's shape: four streams, unrolled Sinkhorn, router, cache writes, nested templates."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree

from precede.model.batch import StepBatch, StepRequest
from precede.model.cache import CacheLayout, Caches
from precede.model.config import ModelConfig
from precede.model.ops.gate import route
from precede.model.ops.kv import write

STREAMS, DIM, EXPERTS, TOPK, ROUNDS = 4, 32, 8, 2, 2


@dataclass
class Context:
    image: torch.Tensor
    slots: torch.Tensor
    scale: float


pytree.register_dataclass(Context)


class Coefficients(nn.Module):
    template_kind = "coefficients"

    def __init__(self) -> None:
        super().__init__()
        self.fn = nn.Parameter(torch.randn(2 * STREAMS + STREAMS**2, STREAMS * DIM) * 0.02)

    def forward(self, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        flat = streams.flatten(1).float()
        mixed = F.linear(flat, self.fn) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + 1e-6)
        pre, post, comb = mixed.split([STREAMS, STREAMS, STREAMS**2], dim=-1)
        comb = torch.softmax(comb.view(-1, STREAMS, STREAMS), -1)
        for _ in range(ROUNDS):
            comb = comb / (comb.sum(-1, keepdim=True) + 1e-6)
            comb = comb / (comb.sum(-2, keepdim=True) + 1e-6)
        return pre.sigmoid(), 2 * post.sigmoid(), comb


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, DIM))
        self.bias = nn.Parameter(torch.randn(EXPERTS))
        self.bias_vl = nn.Parameter(torch.randn(EXPERTS))

    def forward(self, x: torch.Tensor, image: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return route(x, self.weight, self.bias, self.bias_vl, image, TOPK, 1.5)


class Mix(nn.Module):
    template_kind = "mix"

    def __init__(self, gate: type[nn.Module]) -> None:
        super().__init__()
        self.gate = gate()
        self.experts = nn.Parameter(torch.randn(EXPERTS, DIM) * 0.1)

    def forward(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        weights, ids = self.gate(x, context.image)
        picked = self.experts.index_select(0, ids.flatten()).view(-1, TOPK, DIM)
        return x + context.scale * (picked * weights.unsqueeze(-1)).sum(1)


class Store(nn.Module):
    """Writes its rows and gives the store back: returns an argument unchanged."""

    @property
    def template_kind(self) -> tuple[str, bool]:
        return ("store", self.twice)

    def __init__(self, twice: bool) -> None:
        super().__init__()
        self.twice = twice
        self.proj = nn.Linear(DIM, 64, bias=False)

    def forward(self, x: torch.Tensor, pool: torch.Tensor, context: Context) -> tuple[torch.Tensor, torch.Tensor]:
        seen = pool.flatten(0, 1).index_select(0, context.slots.clamp(min=0))
        pool = write(pool, self.proj(x), context.slots)
        if self.twice:
            pool = write(pool, seen + 1.0, context.slots)
        return seen.mean(-1, keepdim=True) + x, pool


class Layer(nn.Module):
    @property
    def template_kind(self) -> tuple[str, bool]:
        return ("layer", self.store.twice)

    def __init__(self, twice: bool, gate: type[nn.Module]) -> None:
        super().__init__()
        self.coefficients = nn.ModuleList(Coefficients() for _ in range(2))
        self.store, self.ffn = Store(twice), Mix(gate)

    def forward(
        self, streams: torch.Tensor, pre: torch.Tensor, pool: torch.Tensor, context: Context
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        for number, coefficients in enumerate(self.coefficients):
            following, post, comb = coefficients(streams)
            x = (streams * pre.unsqueeze(-1)).sum(1)
            if number == 0:
                x, _ = self.store(x, pool, context)
            else:
                x = self.ffn(x, context)
            streams = post.unsqueeze(-1) * x.unsqueeze(1) + torch.einsum("tij,tid->tjd", comb, streams)
            pre = following
        return streams, pre, None


class Toy(nn.Module):
    """`forward(batch, caches)` with the protocol of the real model."""

    def __init__(self, layers: int = 4, gate: type[nn.Module] = Gate) -> None:
        super().__init__()
        self.embed = nn.Embedding(512, DIM)
        self.layers = nn.ModuleList(Layer(i == 1, gate) for i in range(layers))
        self.head = nn.Linear(DIM, 48, bias=False)

    def forward(self, batch: StepBatch, caches: Caches) -> torch.Tensor:
        image = batch.token_ids == 7
        streams = self.embed(batch.token_ids).unsqueeze(1).expand(-1, STREAMS, -1)
        pre = torch.ones_like(streams[:, :, 0])
        context = Context(image=image, slots=batch.token_slot, scale=0.5)
        for number, layer in enumerate(self.layers):
            streams, pre, _ = layer(streams, pre, caches.window[number], context)
        x = (streams * pre.unsqueeze(-1)).sum(1).index_select(0, batch.kept_rows)
        return self.head(x.index_select(0, batch.logit_rows)).float()


def make(layers: int = 4, gate: type[nn.Module] = Gate) -> tuple[Toy, StepBatch, Caches]:
    """A toy with a step of two requests and stores of width 64."""
    torch.manual_seed(0)
    model = Toy(layers, gate).eval().requires_grad_(False)
    return model, step(layout()), small_caches(layers)


def layout() -> CacheLayout:
    return CacheLayout.of(ModelConfig.preset("nano"), "exact32", page_size=8)


def step(layout: CacheLayout, rows: tuple[int, ...] = (5, 3)) -> StepBatch:
    requests = [
        StepRequest(token_ids=[(7 * i + r) % 97 for i in range(n)], pages=list(range(1 + 4 * r, 5 + 4 * r)), ring=r + 1)
        for r, n in enumerate(rows)
    ]
    return StepBatch.of(requests, layout)


def small_caches(layers: int) -> Caches:
    return Caches(window=[torch.zeros(9, 8, 64) for _ in range(layers)], latent=[], index_key=[], group=[])


def config() -> ModelConfig:
    """A config with the toy's sizes, for passes that look at it."""
    small = dataclasses.replace(
        ModelConfig.preset("nano"), hidden_size=DIM, n_routed_experts=EXPERTS, num_experts_per_tok=TOPK
    )
    object.__setattr__(small, "num_hidden_layers", 4)  # a real config of four layers would need a KV source among them
    return small
