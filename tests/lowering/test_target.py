import pytest
import torch

from precede.lowering.errors import UnsupportedOnTarget
from precede.lowering.target import TARGETS, resolve_target


def test_names():
    assert list(TARGETS) == ["cpu", "sm_90", "sm_100", "sm_120"]
    for name, target in TARGETS.items():
        assert resolve_target(name) is target
        assert (target.device == "cuda") == (target.capability is not None)


def test_native_fp4_needs_blackwell():
    assert [t.native_fp4 for t in TARGETS.values()] == [False, False, True, True]


def test_host_without_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_target("host").name == "cpu"


@pytest.mark.parametrize(("capability", "name"), [((9, 0), "sm_90"), ((10, 0), "sm_100"), ((12, 0), "sm_120")])
def test_host_with_gpu(monkeypatch, capability, name):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert resolve_target("host").name == name


def test_host_with_older_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A100")
    with pytest.raises(UnsupportedOnTarget, match=r"A100 has compute capability 8\.0.*use target cpu"):
        resolve_target("host")


@pytest.mark.parametrize("name", ["sm_80", "gpu", "", "CPU"])
def test_unknown(name):
    with pytest.raises(UnsupportedOnTarget, match=r"is unknown; choose host .* cpu, sm_90, sm_100, sm_120"):
        resolve_target(name)
