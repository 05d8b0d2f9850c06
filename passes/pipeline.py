"""The order of the passes, written once, each with its reason."""

from __future__ import annotations

from dataclasses import dataclass

from .canonicalize import Canonicalize
from .manager import Pass
from .mega_gate import MegaGate


@dataclass(frozen=True)
class Step:
    """A pass and why it stands where it stands."""

    rewriting: Pass
    because: str


STEPS: tuple[Step, ...] = (
    Step(Canonicalize(), because="patterns match cleaned graphs only, and names are given here once"),
    Step(MegaGate(), because="a router is one launch; nothing later looks into it"),
)

PIPELINE: tuple[Pass, ...] = tuple(step.rewriting for step in STEPS)
