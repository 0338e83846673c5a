"""Two hosts and a small disk for tests."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from disks import SmallDisk
from hosts import Bed, missing


@pytest.fixture(scope="module")
def bed() -> Iterator[Bed]:
    """Two hosts that are reached by ssh; skips where none can be made."""
    if reason := missing():
        pytest.skip(reason)
    with Bed(hosts=2) as bed:
        yield bed


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[SmallDisk]:
    """24 MB."""
    path = tmp_path / "disk"
    path.mkdir()
    if (
        sys.platform != "linux"
        or subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(path)], capture_output=True
        ).returncode
    ):
        pytest.skip("needs the right to mount a file system")
    try:
        yield SmallDisk(path)
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)
