"""With gradients on, leaf ops are differentiable: straight-through quantisers, caches written out of place."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from precede.model.batch import StepBatch, StepRequest
from precede.model.cache import CacheLayout, allocate
from precede.model.checkpoint import load_checkpoint
from precede.model.errors import PrecedeError
from precede.model.transformer import Transformer

from ..golden_cases import Case, Sequences


def loss_of(model: Transformer, ids: list[list[int]]) -> torch.Tensor:
    layout = CacheLayout.of(model.config, model.numerics, page_size=16)
    model.set_layout(layout)
    logits = Sequences(model, layout, ids).step(0, len(ids[0]))
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), torch.tensor(ids)[:, 1:].flatten())


@pytest.mark.parametrize("numerics", ["exact32", "native"])
def test_every_weight_that_can_learn_gets_a_gradient(checkpoint_of: Callable[[str], Path], numerics: str) -> None:
    model = load_checkpoint(checkpoint_of("nano"), numerics)
    for p in model.parameters():
        p.requires_grad_(True)
    rng = random.Random(0)
    loss_of(model, [[rng.randrange(3, 500) for _ in range(24)] for _ in range(2)]).backward()
    missing = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()]
    # The indexer only chooses, the selection biases too: no gradient passes a choice.
    assert all(".indexer." in n or n.endswith((".bias", ".bias_vl")) for n in missing), missing
    moved = {n for n, p in model.named_parameters() if p.grad is not None and bool(p.grad.any())}
    for part in ("compressor.wkv", "compressor.wgate", "engram.wkv", "hc_attn.fn", "attn_sink", "experts.w2", "wo_a"):
        assert any(part in n for n in moved), part


def test_the_callers_caches_stay_untouched_while_training(checkpoint_of: Callable[[str], Path]) -> None:
    model = load_checkpoint(checkpoint_of("nano"), "exact32").requires_grad_(True)
    layout = CacheLayout.of(model.config, model.numerics, page_size=16)
    model.set_layout(layout)
    seq = Sequences(model, layout, [[5] * 20])
    seq.step(0, 20)
    assert not any(bool(t.any()) for t in (*seq.caches.window, *seq.caches.latent, *seq.caches.index_key))


def test_a_partly_frozen_model_leaves_the_callers_caches_too(checkpoint_of: Callable[[str], Path]) -> None:
    model = load_checkpoint(checkpoint_of("nano"), "exact32")
    assert not any(p.requires_grad for p in model.parameters()), "inference is what a loaded model is for"
    model.get_parameter("layers.6.attn.wkv.weight").requires_grad_(True)
    seq = Sequences(model, model.layout, [[5] * 20])
    seq.step(0, 20)
    assert not any(bool(t.any()) for t in (*seq.caches.window, *seq.caches.latent, *seq.caches.index_key))


def test_padding_rows_give_no_gradient(checkpoint_of: Callable[[str], Path]) -> None:
    """A row that attends to nothing must not spoil the sinks."""
    model = load_checkpoint(checkpoint_of("nano"), "exact32").requires_grad_(True)
    request = StepRequest(token_ids=list(range(3, 23)), pages=[1], ring=1, logits="all")
    grads = []
    for rows in (20, 23):
        model.zero_grad()
        logits = model(StepBatch.of([request], model.layout, rows=rows), allocate(model.layout, pages=2, rings=2))
        logits.square().mean().backward()
        grads.append([model.get_parameter(f"layers.{i}.attn.attn_sink").grad for i in range(10)])
    for plain, padded in zip(*grads, strict=True):
        torch.testing.assert_close(padded, plain)


def test_indexers_learn_from_their_own_loss(checkpoint_of: Callable[[str], Path]) -> None:
    """A few steps on the divergence alone bring it down, and move nothing but indexers."""
    model = load_checkpoint(checkpoint_of("nano"), "exact32").requires_grad_(False)
    learned = [p.requires_grad_(True) for n, p in model.named_parameters() if ".indexer." in n]
    layout = CacheLayout.of(model.config, model.numerics, page_size=16)
    model.set_layout(layout)
    optimizer = torch.optim.Adam(learned, lr=3e-3)
    losses = []
    for _ in range(5):
        taps: dict[str, torch.Tensor] = {}
        Sequences(model, layout, [list(range(3, 51))]).step(0, 48, taps=taps)
        per_source = [taps[f"layers.{i}.index_loss"] for i in model.config.index_source_layer_ids]
        assert all(float(x.detach()) >= 0 for x in per_source)
        loss = torch.stack(per_source).sum()
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad is not None and bool(p.grad.any()) for p in learned)
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.9 * losses[0]


def test_packed_stores_cannot_be_trained_through(checkpoint_of: Callable[[str], Path]) -> None:
    model = load_checkpoint(checkpoint_of("nano"), "native").requires_grad_(True)
    layout = CacheLayout.of(model.config, model.numerics, page_size=16, store="packed")
    model.set_layout(layout)
    with pytest.raises(PrecedeError, match="store='values'"):
        Sequences(model, layout, [[5] * 4]).step(0, 4)


@pytest.mark.parametrize(
    "name",
    [
        "layers.0.attn.wq_a.weight",
        "layers.1.attn.compressor.wgate.weight",
        "layers.3.attn.compressor.wkv.weight",
        "layers.1.engram.wkv.weight",
        "layers.2.hc_ffn.fn",
        "layers.4.ffn.experts.w1",
        "layers.5.attn.attn_sink",
        "head.weight",
    ],
)
def test_gradients_agree_with_differences(name: str) -> None:
    """The derivative along the gradient against a central difference, on a model whose choices are all forced."""
    case = Case(Path(__file__).parents[1] / "golden" / "data" / "d_smooth")
    model = case.model("exact").requires_grad_(False)
    weight = model.get_parameter(name)
    weight.requires_grad_(True)
    loss_of(model, case.prompts).backward()
    assert weight.grad is not None
    slope = float(weight.grad.norm())
    direction, step = weight.grad / slope, min(2e-3 / slope, 0.3)
    losses = []
    with torch.no_grad():
        for sign in (1, -2):
            weight.add_(direction, alpha=sign * step)
            losses.append(float(loss_of(model, case.prompts)))
    assert (losses[0] - losses[1]) / (2 * step) == pytest.approx(slope, rel=0.02)
