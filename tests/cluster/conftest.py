"""The beds that the tests of this folder run in, started once when a test asks for them."""

from __future__ import annotations

from collections.abc import Iterator

import hosts
import pytest
from slurm import Slurm, slurm_cluster, why_not


@pytest.fixture(scope="session")
def bed_of_hosts() -> Iterator[hosts.Bed]:
    """Three hosts that are reached by ssh; skips where none can be made."""
    if reason := hosts.missing():
        pytest.skip(reason)
    with hosts.Bed(hosts=3) as bed:
        yield bed


@pytest.fixture
def bed(bed_of_hosts: hosts.Bed) -> Iterator[hosts.Bed]:
    """The hosts, whole again after each test: every link up and unlimited, nothing running, no file left over."""
    yield bed_of_hosts
    bed_of_hosts.reset()


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """A Slurm cluster of a login host and two nodes."""
    if reason := why_not():
        pytest.skip(reason)
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster
