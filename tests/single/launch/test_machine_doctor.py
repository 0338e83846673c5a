"""`lockstep doctor` tells what is there, and what is wrong."""

from __future__ import annotations

import json
import platform
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lockstep.cli import main
from lockstep.launch.machine_doctor import Fact, examine
from lockstep.world import accelerator, machine


def _facts() -> dict[str, Fact]:
    return {fact.subject: fact for fact in examine()}


def test_it_lists_what_is_here_and_the_cure_of_stale_variables(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("RANK", "0"), ("OMP_NUM_THREADS", "500")):
        monkeypatch.setenv(name, value)
    assert main(["doctor"]) == 1
    said = " ".join(capsys.readouterr().out.split())
    for subject in ("torch", "backends", "gloo", "launcher", "cores", "memory", "this folder", "loopback"):
        assert subject in said
    assert "unset RANK" in said
    assert "export OMP_NUM_THREADS=" in said


def test_json_has_versions_and_checks_but_no_host_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "500")
    for module, name in ((platform, "node"), (socket, "gethostname")):
        monkeypatch.setattr(module, name, lambda: "secret-host")
    assert main(["doctor", "--json"]) == 1
    printed = capsys.readouterr().out
    report = json.loads(printed)
    assert report["packages"]["torch"] == torch.__version__.partition("+")[0]
    (threads,) = (check for check in report["checks"] if check["subject"] == "OMP_NUM_THREADS")
    assert threads["found"] == "500"
    assert "export OMP_NUM_THREADS=" in threads["fix"]
    assert "secret-host" not in printed


def test_devices_and_what_torch_is_built_for(accelerators: Callable[..., None]) -> None:
    accelerators(
        kind="xpu",
        count=2,
        has_collectives=False,
        name="Data Center GPU Max",
        total_memory=64 << 30,
        identity=lambda device: f"0 {device.index}",
        drivers=["Intel xe"],
        build="oneAPI 20250101",
    )
    facts = _facts()
    assert facts["GPU 0"] == Fact("GPU 0", "Data Center GPU Max, 64 GiB (0 0)")
    assert facts["GPU 1"].found.endswith("(0 1)")
    assert facts["GPUs"] == Fact("GPUs", "driver: Intel xe; torch is built for oneAPI 20250101")
    assert "GPUs together" not in facts


@pytest.mark.parametrize(
    ("variable", "drivers", "words"),
    [
        (
            None,
            ["NVIDIA nvidia 470.1"],
            "torch finds no GPU (the driver is too old); install the torch build for your GPU",
        ),
        ("ROCR_VISIBLE_DEVICES", ["AMD amdgpu"], "ROCR_VISIBLE_DEVICES= hides all GPUs; to use them, unset it"),
        (None, [], ""),
    ],
)
def test_missing_gpu_is_explained(
    monkeypatch: pytest.MonkeyPatch,
    accelerators: Callable[..., None],
    variable: str | None,
    drivers: list[str],
    words: str,
) -> None:
    for name in accelerator.VISIBLE:
        monkeypatch.delenv(name, raising=False)
    if variable:
        monkeypatch.setenv(variable, "")
    accelerators(kind=None, count=0, drivers=drivers, why_none="the driver is too old", build="CUDA 13.0")
    found = f"none; driver: {drivers[0] if drivers else 'none'}; torch is built for CUDA 13.0"
    assert _facts()["GPUs"] == Fact("GPUs", found, words)


@pytest.mark.parametrize(("gpus", "users"), [(1, "loader processes;"), (2, "loader processes and NCCL;")])
def test_small_shared_memory_names_its_users(
    room: Callable[[int], None], accelerators: Callable[..., None], gpus: int, users: str
) -> None:
    accelerators(kind="cuda", count=gpus, has_collectives=False, name="", total_memory=0, identity="")
    room(64 << 20)  # docker's default
    fix = _facts()["/dev/shm"].fix
    assert users in fix
    assert ("NCCL_SHM_DISABLE=1" in fix) == (gpus > 1)


def test_drivers_that_linux_has_loaded(tmp_path: Path) -> None:
    assert machine.drivers(tmp_path) == []
    (tmp_path / "nvidia").mkdir()
    (tmp_path / "nvidia" / "version").write_text("550.54.15\n")
    (tmp_path / "xe").mkdir()
    assert machine.drivers(tmp_path) == ["NVIDIA nvidia 550.54.15", "Intel xe"]


def test_the_libraries_name_their_versions() -> None:
    assert accelerator.libraries()[0] == "gloo"
    if torch.distributed.is_nccl_available():
        assert any(library.startswith("nccl 2.") for library in accelerator.libraries())
