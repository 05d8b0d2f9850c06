"""What an engine is built for: the host's CPU, or one of the GPU generations that kernels exist for."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import UnsupportedOnTarget


@dataclass(frozen=True, kw_only=True)
class Target:
    """A device family and what it can do.

    capability   CUDA compute capability (major, minor); None on a CPU
    fp8          tensor cores multiply FP8
    native_fp4   tensor cores multiply FP4 with block scales; elsewhere FP4 weights are decoded in the kernel
    """

    name: str
    device: str
    capability: tuple[int, int] | None
    fp8: bool
    native_fp4: bool
    about: str


_TARGETS = (
    Target(name="cpu", device="cpu", capability=None, fp8=False, native_fp4=False, about="any CPU that torch runs on"),
    Target(name="sm_90", device="cuda", capability=(9, 0), fp8=True, native_fp4=False, about="Hopper: H100, H200"),
    Target(name="sm_100", device="cuda", capability=(10, 0), fp8=True, native_fp4=True, about="Blackwell: B200, GB200"),
    Target(
        name="sm_120", device="cuda", capability=(12, 0), fp8=True, native_fp4=True, about="Blackwell: RTX 50, RTX PRO"
    ),
)
TARGETS = {target.name: target for target in _TARGETS}


def resolve_target(name: str) -> Target:
    """The target called `name`; "host" is this machine's first GPU if torch sees one, else its CPU.

    Raises UnsupportedOnTarget for an unknown name, or a GPU of another generation.
    """
    if name == "host":
        return _host()
    if name not in TARGETS:
        known = ", ".join(TARGETS)
        raise UnsupportedOnTarget(f"target {name!r} is unknown; choose host (this machine) or one of {known}")
    return TARGETS[name]


def _host() -> Target:
    import torch

    if not torch.cuda.is_available():
        return TARGETS["cpu"]
    capability = torch.cuda.get_device_capability()
    for target in _TARGETS:
        if target.capability == capability:
            return target
    raise UnsupportedOnTarget(
        f"{torch.cuda.get_device_name()} has compute capability {capability[0]}.{capability[1]}; kernels exist for "
        f"{', '.join(t.name for t in _TARGETS if t.capability)}; use target cpu"
    )
