"""The bed of hosts that the tests of this folder share, and their imports."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import netns


@pytest.fixture(scope="session")
def bed_of_hosts() -> Iterator[netns.Bed]:
    """Three hosts that are reached by ssh; skips where none can be made."""
    if reason := netns.missing():
        pytest.skip(reason)
    with netns.Bed(hosts=3) as bed:
        yield bed


@pytest.fixture
def bed(bed_of_hosts: netns.Bed) -> Iterator[netns.Bed]:
    """The hosts, whole again after each test: every link up and unlimited, nothing running, no file left over."""
    yield bed_of_hosts
    bed_of_hosts.reset()
