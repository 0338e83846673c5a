"""`lockstep doctor --nccl-log`: wrong and good logs, in the formats of NCCL 2.20 to 2.30 and aws-ofi-nccl."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.cli import main
from lockstep.launch.nccl_log import read_nccl_log

OFI = ("AWS Libfabric", "OFI", "Libfabric")
HSN = ("hsn0", "hsn1", "hsn2", "hsn3")
BOOT_20 = "Bootstrap : Using hsn0:10.150.0.7<0>"  # until 2.25
BOOT_28 = "Bootstrap: Using hsn0:10.150.0.7<0>"
LOADED_20 = (
    "NET/Plugin: Loaded net plugin AWS Libfabric (v8)\nNET/Plugin: Failed to find ncclCollNetPlugin symbol (>= v5)."
)
OFI_USED = "Using network Libfabric"
CXI = "NET/OFI Selected Provider is cxi (found 4 nics)"
IB = "NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB ib0:10.1.0.4<0>\nUsing network IB"
NO_IB = "NET/IB : No device found."
SOCKETS = "NET/Socket : Using [0]hsn0:10.150.0.7<0> [1]hsn1:10.150.1.7<0>\nUsing network Socket"

NO_PLUGIN = "NET/Plugin : No plugin found (libnccl-net.so), using internal implementation"
OFI_INITIALIZED = "Initialized NET plugin Libfabric\nAssigned NET plugin Libfabric to comm\nUsing network Libfabric"
TCP = "NET/OFI Selected provider is tcp, fabric is 10.0.0.0/8 (found 1 nics)\nUsing network AWS Libfabric"
LOADED_27 = "Successfully loaded external network plugin libnccl-net.so"
TOO_OLD = "NET/Plugin: Failed to find ncclNetPlugin symbol (>= v5)."
NOT_INITIALIZED = "Failed to initialize NET plugin Libfabric"
NO_GDR = "NET/OFI Could not disable CUDA API usage for HMEM, disabling GDR"

GOOD = [
    ("2.20.3", OFI, HSN, [BOOT_20, LOADED_20, CXI, "Using network AWS Libfabric"]),
    ("2.21.5", OFI, HSN, [BOOT_20, "NET/Plugin: Failed to find ncclNetPlugin_v8 symbol.", CXI, OFI_USED]),
    ("2.22.3", (), (), [BOOT_20, NO_PLUGIN, IB]),
    ("2.23.4", (), (), [BOOT_20, "NET/Plugin: Could not find: libnccl-net.so. Using internal network plugin.", IB]),
    ("2.24.3", (), HSN, [BOOT_20, NO_IB, SOCKETS]),
    ("2.25.1", ("IB",), ("ib", "hsn"), [BOOT_28, "NET/Plugin: Using internal network plugin.", IB]),
    ("2.26.2", OFI, HSN, [BOOT_28, "NET/Plugin: Loaded net plugin Libfabric (v10)", CXI, OFI_USED]),
    ("2.27.7", OFI, HSN, [BOOT_28, LOADED_27, CXI, "Using network OFI"]),
    ("2.28.3", OFI, HSN, [BOOT_28, CXI, OFI_INITIALIZED]),
    ("2.28.9", (), (), [BOOT_28, "Failed to initialize NET plugin IB", "Initialized NET plugin Socket", SOCKETS]),
]
WRONG = [
    ("uses the network Socket instead of AWS Libfabric", "2.20.3", OFI, HSN, [BOOT_20, NO_PLUGIN, SOCKETS]),
    ("interface docker0", "2.21.5", (), (), ["Bootstrap : Using docker0:172.17.0.1<0>", NO_IB, "Using network Socket"]),
    ("bond0 instead of hsn0", "2.22.3", OFI, HSN, ["Bootstrap : Using bond0:10.2.0.7<0>", CXI, OFI_USED]),
    ("libfabric provider tcp", "2.23.4", OFI, HSN, [BOOT_20, TCP]),
    ("too old or too new", "2.20.5", OFI, HSN, [BOOT_20, TOO_OLD, SOCKETS]),
    ("no network AWS Libfabric", "2.24.3", OFI, HSN, [BOOT_20, "Error: network AWS Libfabric not found."]),
    ("could not initialize the plugin Libfabric", "2.28.3", OFI, HSN, [BOOT_28, NOT_INITIALIZED, SOCKETS]),
    ("without a usable libfabric", "2.26.2", OFI, HSN, [BOOT_28, "NET/OFI No eligible providers were found", SOCKETS]),
    ("no usable interface", "2.27.7", (), (), ["Bootstrap : no socket interface found"]),
    ("no usable interface", "2.30.7", (), (), [BOOT_28, "NET/IB : No IP interface found."]),
    ("no usable interface", "2.30.7", (), (), [BOOT_28, "NET/Socket : No usable listening interface found"]),
    ("disabled GPUDirect", "2.28.3", OFI, HSN, [BOOT_28, NO_GDR, CXI, OFI_USED]),
]


def _log(version: str, texts: list[str], host: str = "nid0001") -> list[str]:
    lines = [line for text in texts for line in text.splitlines()]
    warnings = ("Error:", "Bootstrap : no")
    levels = ["misc/file.cc:12 NCCL WARN" if line.startswith(warnings) else "NCCL INFO" for line in lines]
    plain = [f"{host}:4112:4200 [0] {level} {line}" for level, line in zip(levels, lines, strict=True)]
    return ["epoch 1: a line of the program", f"NCCL version {version}+cuda12.8", *plain]


@pytest.mark.parametrize(("version", "plugin", "interfaces", "texts"), GOOD)
def test_good_log_has_no_fault(
    version: str, plugin: tuple[str, ...], interfaces: tuple[str, ...], texts: list[str]
) -> None:
    found = read_nccl_log(_log(version, texts), plugin, interfaces)
    assert found.faults == ()
    assert found.version == f"{version}+cuda12.8"
    assert len(found.networks) == 1


@pytest.mark.parametrize(("fault", "version", "plugin", "interfaces", "texts"), WRONG)
def test_wrong_log_has_exactly_its_fault(
    fault: str, version: str, plugin: tuple[str, ...], interfaces: tuple[str, ...], texts: list[str]
) -> None:
    found = read_nccl_log(_log(version, texts), plugin, interfaces)
    assert len(found.faults) == 1
    assert fault in found.faults[0]


def test_hosts_with_different_networks_are_a_fault() -> None:
    lines = [*_log("2.28.3", ["Using network Libfabric"]), *_log("2.28.3", ["Using network Socket"], "nid0002")]
    assert "different networks: Libfabric, Socket" in read_nccl_log(lines).faults[0]


def test_log_without_networks_is_a_fault() -> None:
    assert "run the job with NCCL_DEBUG=INFO" in read_nccl_log(["epoch 1"]).faults[0]


def test_doctor_reads_a_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "nccl.txt"
    path.write_text("\n".join(_log("2.20.3", [BOOT_20, SOCKETS])))
    assert main(["doctor", "--nccl-log", str(path), "--site", "frontier"]) == 1
    said = capsys.readouterr().out
    assert "interface hsn0, hsn1" in said
    assert "problem: NCCL uses the network Socket instead of AWS Libfabric or OFI or Libfabric" in said
    assert main(["doctor", "--nccl-log", str(path), "--site", "none"]) == 0
    assert main(["doctor", "--nccl-log", str(tmp_path / "none.txt"), "--site", "none"]) == 2
