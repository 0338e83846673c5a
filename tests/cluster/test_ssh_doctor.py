"""`lockstep doctor -H` on hosts that are reached by ssh: what it measures, and what it finds wrong."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from hosts import HEAD, Bed

pytestmark = pytest.mark.cold  # on hosts of their own

LIMIT = 50e6
UNITS = {"Mbit/s": 1e6, "Gbit/s": 1e9}


def doctor(bed: Bed, folder: Path, hosts: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lockstep", "doctor", "-H", hosts, f"--ssh-option={bed.ssh_options}"]
    process = bed.start(HEAD, command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, err = process.communicate(timeout=100)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def bandwidths(said: str) -> dict[str, float]:
    """Bits a second, by the hosts between which they were measured."""
    rows = re.findall(r"^ *(\w+ and \w+|all together) .*?([\d.]+) ([MG]bit/s)", said, re.MULTILINE)
    return {names: float(number) * UNITS[unit] for names, number, unit in rows}


def test_a_limited_link_is_measured_and_named(bed: Bed, tmp_path: Path) -> None:
    bed.limit("node3", "50mbit")
    done = doctor(bed, tmp_path, "node1:2,node2,node3")
    assert done.returncode == 1, done.stderr
    for name in bed.names:
        assert re.search(rf"^ *{name} .*{bed.interfaces[name]} {bed.addresses[name]}", done.stdout, re.MULTILINE)
    speeds = bandwidths(done.stdout)
    for names in ("node2 and node3", "node3 and node1", "all together"):
        assert LIMIT / 4 < speeds[names] < 2 * LIMIT
        assert f"{names.replace('all', 'all hosts')}: " in done.stdout
    assert speeds["node1 and node2"] > 2 * LIMIT
    assert [path for name in bed.names for path in bed.files(name)] == []


def test_a_host_that_does_not_start_is_the_launchers_error(bed: Bed, tmp_path: Path) -> None:
    done = doctor(bed, tmp_path, "node1,closed")
    assert done.returncode == 3
    assert "closed has no SSH server" in done.stderr
    assert done.stdout == ""
