"""Which backend builds an engine, and why not another one."""

from __future__ import annotations

from .errors import BackendUnavailable
from .manifest import Decision, Refusal
from .part import PartSpec
from .target import Target

# In the order in which "auto" tries them.
BACKENDS = ("tensorrt", "program", "inductor", "reference")

_NOT_BUILT = {
    "tensorrt": "this version of precede cannot build TensorRT plans",
    "program": "this version of precede has no kernels to schedule",
    "inductor": "this version of precede does not build Inductor packages",
}


def unavailable(backend: str, target: Target) -> str | None:
    """Why `backend` cannot build for `target` here; None if it can."""
    if backend in ("tensorrt", "program") and target.device != "cuda":
        return f"{backend} builds for GPUs, the target is {target.name}"
    return _NOT_BUILT.get(backend)


def choose_backend(name: str, target: Target) -> tuple[str, list[Decision]]:
    """The backend for an engine, and the decision with every refusal.

    "auto" takes the first one that is available; a named one is never replaced by another.
    Raises BackendUnavailable if the named one is unknown or cannot build for the target.
    """
    if name != "auto":
        if name not in BACKENDS:
            raise BackendUnavailable(f"backend {name!r} is unknown; choose auto or one of {', '.join(BACKENDS)}")
        reason = unavailable(name, target)
        if reason is not None:
            raise BackendUnavailable(f"backend {name} is unavailable: {reason}; use backend auto or reference")
        return name, [Decision(op="*", part="*", implementation=name, reason="asked for by name", refused=[])]
    refused = []
    for backend in BACKENDS:
        reason = unavailable(backend, target)
        if reason is None:
            why = f"the first available backend for {target.name}"
            return backend, [Decision(op="*", part="*", implementation=backend, reason=why, refused=refused)]
        refused.append(Refusal(implementation=backend, reason=reason))
    raise AssertionError("the reference backend is always available")


def reference_decisions(part: PartSpec) -> list[Decision]:
    """One decision for each operator of a part that the reference backend runs."""
    reason = "the reference backend runs every operator as torch and this package define it"
    return [
        Decision(op=target, part=part.name, implementation="reference", reason=reason, refused=[])
        for target in part.targets()
    ]
