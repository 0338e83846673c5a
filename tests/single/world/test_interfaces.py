"""The interface passed to Gloo."""

from __future__ import annotations

import os

import psutil
import pytest
import torch.distributed as dist

from lockstep.world import interfaces
from lockstep.world.interfaces import AWAY, EVERYWHERE, LOOPBACK, choose_interface
from lockstep.world.launcher_environment import RankInfo
from lockstep.world.rendezvous import serve_store

HERE = RankInfo(1, 2, 1, 2, 0, "Slurm")
APART = RankInfo(1, 2, 0, 1, 1, "Slurm")


@pytest.fixture(autouse=True)
def _no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the caller's choice nor, afterwards, this test's."""
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")
        del os.environ[name]


def _chosen() -> tuple[str | None, str | None]:
    return os.environ.get("GLOO_SOCKET_IFNAME"), os.environ.get("NCCL_SOCKET_IFNAME")


@pytest.mark.parametrize(
    ("place", "chosen", "uses"),
    [
        (HERE, "ib0", ("ib0", None)),  # the user's choice stands
        (HERE, "", ("lo", "lo")),
        (APART, "", ("lo", "lo")),  # nodes that meet at loopback are all here
    ],
)
def test_a_job_on_one_host_uses_loopback(place: RankInfo, chosen: str, uses: tuple[str, str | None]) -> None:
    if chosen:
        os.environ["GLOO_SOCKET_IFNAME"] = chosen
    choose_interface(place, dist.HashStore(), "127.0.0.1")
    assert _chosen() == uses


@pytest.mark.parametrize(
    ("ways", "noted"),
    [
        ({"hal01": "10.0.0.2"}, b"10.0.0.2"),
        # The name of rank 0's host means loopback there, so that the way to another host counts.
        ({"hal01": "127.0.1.1", "10.0.0.3": "10.0.0.2"}, b"10.0.0.3"),
        ({"hal01": "192.0.2.1"}, b""),
    ],
)
def test_on_several_hosts_it_is_the_one_towards_another(
    monkeypatch: pytest.MonkeyPatch, ways: dict[str, str], noted: bytes
) -> None:
    own = {"10.0.0.2": "eth1"}
    for name, function in (("address_towards", ways.get), ("interface_of", lambda address: own.get(address, ""))):
        monkeypatch.setattr(interfaces, name, function)
    store = dist.HashStore()
    store.set(AWAY, "10.0.0.3")
    if noted:
        choose_interface(APART, store, "hal01")
        assert _chosen() == ("eth1", None)
        assert store.get(AWAY) == noted
    else:
        with pytest.raises(OSError, match=r"no network interface has the address 192\.0\.2\.1"):
            choose_interface(APART, store, "hal01")


def test_an_address_leads_to_its_interface() -> None:
    assert interfaces.interface_of(interfaces.address_towards("127.0.0.1")) == "lo"


@pytest.mark.parametrize(
    ("means", "own", "at"),
    [
        (["10.0.0.1"], [("eth0", "10.0.0.1"), ("ib0", "10.1.0.1")], "10.0.0.1"),
        (["10.2.0.9", "10.1.0.1"], [("eth0", "10.0.0.1"), ("ib0", "10.1.0.1")], "10.1.0.1"),
        (["127.0.1.1"], [("eth0", "10.0.0.1"), ("docker0", "172.17.0.1")], "10.0.0.1"),
        (["127.0.1.1"], [("eth0", "10.0.0.1"), ("eth0", "fd00::1")], "10.0.0.1"),
        (["127.0.1.1"], [("eth0", "10.0.0.1"), ("ib0", "10.1.0.1")], EVERYWHERE),
        (["127.0.1.1"], [], EVERYWHERE),
    ],
)
def test_rank_0_listens_on_one_address_wherever_it_can(means: list[str], own: list[tuple[str, str]], at: str) -> None:
    assert interfaces.reachable_address(means, own) == at


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1"])
def test_rank_0_listens_on_loopback_if_that_is_its_host(name: str) -> None:
    assert interfaces.listening_address(name) == LOOPBACK


def test_a_store_listens_on_its_address_alone() -> None:
    _store, port = serve_store("127.0.0.2")
    mine = psutil.Process().net_connections("tcp")
    listening = [each.laddr for each in mine if each.status == psutil.CONN_LISTEN]
    assert ("127.0.0.2", port) in listening
    assert not [address for address in listening if address.port == port and address.ip != "127.0.0.2"]
