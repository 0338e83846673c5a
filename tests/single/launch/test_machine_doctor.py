"""`lockstep doctor` tells what is there, and what is wrong."""

from __future__ import annotations

import json
import platform
import socket
from pathlib import Path

import pytest
import torch

from lockstep.cli import main
from lockstep.launch import machine_doctor
from lockstep.world import accelerator


def test_it_lists_what_this_machine_has(capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor"])
    said = capsys.readouterr().out
    for subject in ("torch", "backends", "gloo", "launcher", "cores", "memory", "this folder", "loopback"):
        assert subject in said


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


def test_json_of_other_hosts_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json", "-H", "a,b"]) == 2
    assert "--json describes this machine; run it on each host" in capsys.readouterr().err


def test_stale_variables_are_named_with_the_cure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("OMP_NUM_THREADS", "500")
    assert main(["doctor"]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "unset RANK" in said
    assert "export OMP_NUM_THREADS=" in said


def test_devices_and_what_torch_is_built_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator, "kind", lambda: "xpu")
    monkeypatch.setattr(accelerator, "count", lambda: 2)
    monkeypatch.setattr(accelerator, "name", lambda device: "Data Center GPU Max")
    monkeypatch.setattr(accelerator, "total_memory", lambda device: 64 << 30)
    monkeypatch.setattr(accelerator, "identity", lambda device: f"0 {device.index}")
    monkeypatch.setattr(accelerator, "drivers", lambda: ["Intel xe"])
    monkeypatch.setattr(torch.version, "xpu", "20250101")
    monkeypatch.setattr(torch.version, "cuda", None)
    first, second, both = machine_doctor._devices()
    assert (first.subject, first.found) == ("GPU 0", "Data Center GPU Max, 64 GiB (0 0)")
    assert second.subject == "GPU 1"
    assert both.found == "driver: Intel xe; torch is built for oneAPI 20250101"
    assert not any(finding.fix for finding in (first, second, both))


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
    monkeypatch: pytest.MonkeyPatch, variable: str | None, drivers: list[str], words: str
) -> None:
    for name in accelerator.VISIBLE:
        monkeypatch.delenv(name, raising=False)
    if variable:
        monkeypatch.setenv(variable, "")
    monkeypatch.setattr(accelerator, "kind", lambda: None)
    monkeypatch.setattr(accelerator, "count", lambda: 0)
    monkeypatch.setattr(accelerator, "drivers", lambda: drivers)
    monkeypatch.setattr(accelerator, "why_none", lambda: "the driver is too old")
    (finding,) = machine_doctor._devices()
    assert finding.fix == words
    assert finding.found.startswith(f"none; driver: {drivers[0] if drivers else 'none'}; torch is built for ")


@pytest.mark.parametrize(("gpus", "users"), [(1, "loader processes;"), (2, "loader processes and NCCL;")])
def test_small_shared_memory_names_its_users(monkeypatch: pytest.MonkeyPatch, gpus: int, users: str) -> None:
    monkeypatch.setattr(accelerator, "count", lambda: gpus)
    monkeypatch.setattr(machine_doctor, "MIN_SHARED_MEMORY_BYTES", 1 << 60)
    (fix,) = (fact.fix for fact in machine_doctor._storage() if fact.subject == "/dev/shm")
    assert users in fix
    assert ("NCCL_SHM_DISABLE=1" in fix) == (gpus > 1)


def test_drivers_that_linux_has_loaded(tmp_path: Path) -> None:
    assert accelerator.drivers(tmp_path) == []
    (tmp_path / "nvidia").mkdir()
    (tmp_path / "nvidia" / "version").write_text("550.54.15\n")
    (tmp_path / "xe").mkdir()
    assert accelerator.drivers(tmp_path) == ["NVIDIA nvidia 550.54.15", "Intel xe"]


def test_the_libraries_name_their_versions() -> None:
    assert accelerator.libraries()[0] == "gloo"
    if torch.distributed.is_nccl_available():
        assert any(library.startswith("nccl 2.") for library in accelerator.libraries())
