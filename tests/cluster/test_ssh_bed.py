"""The bed itself: hosts that can be distinguished, that ssh reaches, and that can be cut off."""

from __future__ import annotations

import subprocess
import time
from contextlib import suppress
from pathlib import Path

import hosts
import psutil
import pytest

pytestmark = pytest.mark.cold  # on hosts of their own


def _ssh(bed: hosts.Bed, host: str, command: str, *options: str) -> subprocess.CompletedProcess[str]:
    line = bed.at(hosts.HEAD, ["ssh", *bed.ssh_options.split(), "-o", "BatchMode=yes", *options, host, command])
    return subprocess.run(line, capture_output=True, text=True, timeout=20, check=False)


def test_each_host_has_its_own_name_address_and_temporary_folder(bed: hosts.Bed) -> None:
    for name in bed.names:
        done = _ssh(bed, name, "cat /proc/sys/kernel/hostname; echo $TMPDIR; ip -brief -4 address; id -u")
        assert done.stderr == ""
        lines = done.stdout.splitlines()
        assert lines[:2] == [name, str(bed.temporary(name))]
        assert any(line.startswith(bed.interfaces[name]) and bed.addresses[name] in line for line in lines)
        assert lines[-1] == "0"


@pytest.mark.parametrize(
    ("host", "message"),
    [
        ("ghost", ("No route to host", "timed out")),
        ("closed", ("Connection refused",)),
        ("nokey", ("Permission denied",)),
        ("stranger", ("Host key verification failed",)),
    ],
)
def test_names_that_fail_do_so_as_they_should(bed: hosts.Bed, host: str, message: tuple[str, ...]) -> None:
    done = _ssh(bed, host, "true", "-o", "ConnectTimeout=2")
    assert done.returncode == 255
    assert any(words in done.stderr for words in message), done.stderr


def _names(bed: hosts.Bed, host: str) -> list[str]:
    names = []
    for process in bed.processes(host):
        with suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            names.append(process.name())
    return names


def test_bed_knows_processes_by_host_and_can_cut_sessions(bed: hosts.Bed) -> None:
    session = bed.start(hosts.HEAD, ["ssh", *bed.ssh_options.split(), "node2", "sleep 50"])
    deadline = time.monotonic() + 10
    while "sleep" not in _names(bed, "node2"):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert bed.processes("node1") == []
    assert bed.kill_sessions("node2") == 1
    assert session.wait(timeout=10) == 255
    assert "sleep" in _names(bed, "node2")  # that is what sshd leaves behind


def test_a_cable_can_be_pulled_and_put_back(bed: hosts.Bed) -> None:
    bed.link_down("node1")
    assert _ssh(bed, "node1", "true", "-o", "ConnectTimeout=1").returncode == 255
    assert _ssh(bed, "node2", "true").returncode == 0
    bed.link_up("node1")
    assert _ssh(bed, "node1", "true").returncode == 0


def test_a_link_can_be_limited(bed: hosts.Bed) -> None:
    def seconds() -> float:
        start = time.monotonic()
        assert _ssh(bed, "node1", "head -c 5000000 /dev/zero").returncode == 0
        return time.monotonic() - start

    bed.limit("node1", "20mbit")
    limited = seconds()
    assert limited > 1.7
    bed.limit("node1", "")
    assert min(seconds() for _ in range(5)) < limited - 1


def test_nothing_of_a_bed_is_left() -> None:
    if reason := hosts.missing():
        pytest.skip(reason)
    with hosts.Bed(hosts=1) as bed:
        sleeper = bed.start("node1", ["sleep", "60"])
        deadline = time.monotonic() + 20
        while not bed.processes("node1"):  # before it is there, nothing of the bed knows it
            assert time.monotonic() < deadline
            time.sleep(0.02)
        spaces = [bed.namespace(name) for name in ("node1", "head", "switch")]
        assert all((hosts.NAMESPACES / space).exists() for space in spaces)
    assert sleeper.wait(timeout=1) == -9
    assert not any((hosts.NAMESPACES / space).exists() for space in spaces)
    assert not any((Path("/etc/netns") / space).exists() for space in spaces)
    assert not bed.folder.exists()
