"""The one module that names kinds of devices."""

from __future__ import annotations

import ast
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from layers import ROOT

from lockstep.world import accelerator

CUDA = torch.device("cuda", 1)
KINDS_AND_LIBRARIES = ("cuda", "xpu", "mps", "nccl", "xccl")
# Where a name of CUDA's is right, because the feature is NVIDIA's own, or Horovod's or an older script's word.
NVIDIAS_OWN = {
    "world/accelerator.py",
    "config/schema.py",  # what --device takes
    "cli/doctor.py",  # --nccl-log
    "launch/hosts_doctor.py",  # the log of its all-reduces
    "cli/horovodrun.py",  # what --check-build has always said
    "config/legacy_flags.py",
    "data/device_decode.py",  # nvJPEG
    "train/strategies/captured_passes.py",  # CUDA graphs
    "hvd/__init__.py",  # hvd.nccl_built
    "hvd/basics.py",
    "diagnosis/flight_recorder.py",  # each library has a recorder of its own
    "world/interfaces.py",  # NCCL_SOCKET_IFNAME
    "launch/plan/job_plan.py",
    "launch/node/host_workers.py",
    "train/inputs.py",  # --decode gpu, again nvJPEG
}


def named(tree: ast.AST) -> Iterator[str]:
    """What code, not a docstring, says of one kind of device."""
    spoken = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in ("cuda", "is_cuda", "xpu", "is_xpu"):
            yield f".{node.attr}"
        elif isinstance(node, ast.Attribute | ast.Name):
            word = node.attr if isinstance(node, ast.Attribute) else node.id
            if any(kind in word.lower() for kind in ("nccl", "xccl")):
                yield word
        elif isinstance(node, ast.Constant) and node.value in KINDS_AND_LIBRARIES and id(node) not in spoken:
            yield repr(node.value)


def test_no_other_module_names_a_kind_of_device() -> None:
    breaches = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in sorted(ROOT.rglob("*.py"))
        if str(path.relative_to(ROOT)) not in NVIDIAS_OWN
        for name in named(ast.parse(path.read_text()))
    ]
    assert not breaches, breaches


def test_the_rule_finds_what_it_forbids() -> None:
    code = 'torch.cuda.Stream()\nif t.is_cuda or d.type == "cuda": ProcessGroupNCCL()\ndef f():\n    """of nccl"""\n'
    assert sorted(named(ast.parse(code))) == ["'cuda'", ".cuda", ".is_cuda", "ProcessGroupNCCL"]


@pytest.mark.parametrize(
    ("said", "variables", "identity"),
    [
        ({"uuid": "a1", "pci_domain_id": 0, "pci_bus_id": 65, "pci_device_id": 0}, {}, "a1 0 65 0"),
        ({"uuid": "a1"}, {"CUDA_VISIBLE_DEVICES": "MIG-7"}, "a1 MIG-7"),
        ({"uuid": "a1"}, {"CUDA_VISIBLE_DEVICES": "0,1"}, "a1"),
        ({}, {"ZE_AFFINITY_MASK": "0.1"}, "0.1 1"),
        ({}, {}, "1"),
    ],
)
def test_devices_are_distinguished_by_their_identity(
    device_module: Callable[..., None], said: dict[str, Any], variables: dict[str, str], identity: str
) -> None:
    device_module(get_device_properties=lambda device: SimpleNamespace(**said))
    assert accelerator.identity(CUDA, variables) == identity


def test_rocm_devices_with_zero_uuid_are_distinguished(device_module: Callable[..., None]) -> None:
    device_module(get_device_properties=lambda device: SimpleNamespace(uuid="0000", pci_bus_id=device.index))
    assert accelerator.identity(CUDA, {}) != accelerator.identity(torch.device("cuda", 2), {})


def test_sums_are_in_float64_where_the_device_has_it(device_module: Callable[..., None]) -> None:
    assert accelerator.sum_dtype(torch.device("cpu")) == accelerator.sum_dtype(CUDA) == torch.float64
    assert accelerator.sum_dtype(torch.device("mps")) == torch.float32
    for has_fp64 in (False, True):
        device_module(get_device_properties=lambda _, has=has_fp64: SimpleNamespace(has_fp64=has))
        assert accelerator.sum_dtype(torch.device("xpu", 0)) == (torch.float64 if has_fp64 else torch.float32)


@pytest.mark.parametrize(("hip", "cards"), [(None, 1), ("6.4", 2)])  # RCCL connects parts of a device
def test_nccl_takes_instances_of_a_gpu_for_one_card(
    monkeypatch: pytest.MonkeyPatch, device_module: Callable[..., None], hip: str | None, cards: int
) -> None:
    def describe(device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(uuid=f"MIG {device.index}", pci_domain_id=0, pci_bus_id=65, pci_device_id=0)

    device_module(get_device_properties=describe)
    _change(monkeypatch, torch.version, hip=hip)
    found = {accelerator.card(torch.device("cuda", index)) for index in (0, 1)}
    assert len(found) == cards
    assert hip or found == {"PCI address 0000:41:00"}


def _change(monkeypatch: pytest.MonkeyPatch, owner: Any, **attributes: Any) -> None:
    """Set attributes of torch, which it may lack."""
    for name, value in attributes.items():
        monkeypatch.setattr(owner, name, value, raising=False)


class Group:
    """A group's constructor: what it was called with, and the variables that it saw."""

    class Options:
        _timeout: Any = None
        is_high_priority_stream = False

    def __init__(self, store: Any, rank: int, size: int, *rest: Any) -> None:
        self.arguments = (store, rank, size, *rest)
        self.environment = {name: os.environ.get(name) for name in ("TORCH_NCCL_ASYNC_ERROR_HANDLING",)}


@pytest.mark.parametrize("newer", [True, False])
def test_groups_of_nccl(monkeypatch: pytest.MonkeyPatch, newer: bool) -> None:
    class Newer(Group):
        pass

    _change(monkeypatch, dist, ProcessGroupNCCL=Group, ProcessGroupNCCL2=Newer)
    if not newer:
        monkeypatch.delattr(dist, "ProcessGroupNCCL2")
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")  # as torchrun and our node processes set it
    monkeypatch.delenv("TORCH_DIST_USE_NCCL2", raising=False)
    store, patience = dist.HashStore(), timedelta(days=365)
    made = accelerator.group(store, 2, 4, CUDA, patience)
    assert type(made) is (Newer if newer else Group)
    assert made.arguments[:3] == (store, 2, 4)
    assert made.arguments[3]._timeout == patience  # not torch's ten minutes
    assert made.arguments[3].is_high_priority_stream
    if newer:
        assert made.arguments[4] == CUDA  # else torch chooses by LOCAL_RANK
    else:  # the older class would end the process itself, a minute after a peer is gone
        assert made.environment == {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "1"


@pytest.mark.parametrize("extended", [True, False])
def test_groups_of_a_backend_that_another_package_registers(
    monkeypatch: pytest.MonkeyPatch, accelerators: Callable[..., None], extended: bool
) -> None:
    made: list[Any] = []
    plugin = dist.Backend._BackendPlugin(lambda *arguments: made.extend(arguments) or "group", extended)
    monkeypatch.setitem(dist.Backend._plugins, "HCCL", plugin)
    accelerators(backend="hccl")
    store, patience = dist.HashStore(), timedelta(days=1)
    assert accelerator.group(store, 1, 2, torch.device("privateuseone", 1), patience) == "group"
    if extended:
        options = made[0]
        assert (options.group_rank, options.group_size, options.timeout) == (1, 2, patience)
    else:
        assert made == [store, 1, 2, patience]


def test_a_device_without_a_backend_has_no_collectives() -> None:
    assert not accelerator.has_collectives("privateuseone")


@pytest.mark.parametrize("has_options", [True, False])
def test_groups_of_xccl(monkeypatch: pytest.MonkeyPatch, has_options: bool) -> None:
    kind = Group if has_options else type("Older", (), {"__init__": Group.__init__})
    _change(monkeypatch, dist, ProcessGroupXCCL=kind)
    made = accelerator.group(None, 0, 2, torch.device("xpu", 0), timedelta(hours=1))
    assert len(made.arguments) == (4 if has_options else 3)
    if has_options:
        assert made.arguments[3]._timeout == timedelta(hours=1)


def test_streams_are_for_those_that_have_them() -> None:
    kinds = ("cpu", "cuda", "xpu", "mps", "privateuseone")
    assert [kind for kind in kinds if accelerator.overlaps(torch.device(kind))] == ["cuda", "xpu", "privateuseone"]


def test_a_machine_without_a_device() -> None:
    if accelerator.kind() is not None:
        pytest.skip("this one has some")
    assert accelerator.count() == 0
    assert accelerator.names() == []
    assert accelerator.current() == torch.device("cpu")
    accelerator.synchronize()
    accelerator.use(torch.device("cpu"))
    accelerator.seed(1)


@pytest.mark.parametrize(
    ("kind", "deterministic", "hip", "expected"),
    [
        ("cuda", False, None, True),
        ("cuda", True, None, False),
        ("cuda", False, "6.4", False),  # ROCm
        ("xpu", False, None, False),
        ("cpu", False, None, False),
    ],
)
def test_cudnn_times_its_kernels_unless_torch_is_deterministic(
    kind: str, deterministic: bool, hip: str | None, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    _change(monkeypatch, torch.backends.cudnn, benchmark=False)
    _change(monkeypatch, torch.version, hip=hip)
    torch.use_deterministic_algorithms(deterministic)
    accelerator.tune(torch.device(kind, 0))
    torch.use_deterministic_algorithms(False)
    assert torch.backends.cudnn.benchmark is expected
