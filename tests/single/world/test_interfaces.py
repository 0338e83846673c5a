"""The interface passed to Gloo."""

from __future__ import annotations

import os
import socket

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


def test_the_users_choice_stands() -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "ib0"
    choose_interface(HERE, dist.HashStore(), "127.0.0.1")
    assert _chosen() == ("ib0", None)


def test_a_job_on_one_host_uses_loopback() -> None:
    choose_interface(HERE, dist.HashStore(), "127.0.0.1")
    assert _chosen() == ("lo", "lo")


def test_nodes_that_meet_at_loopback_are_all_here() -> None:
    choose_interface(APART, dist.HashStore(), "127.0.0.1")
    assert _chosen() == ("lo", "lo")


def test_on_several_hosts_it_is_the_one_towards_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    ways = {"hal01": "10.0.0.2"}
    monkeypatch.setattr(interfaces, "address_towards", ways.__getitem__)
    monkeypatch.setattr(interfaces, "_interface", {"10.0.0.2": "eth1"}.__getitem__)
    store = dist.HashStore()
    choose_interface(APART, store, "hal01")
    assert _chosen() == ("eth1", None)
    assert store.get(AWAY) == b"10.0.0.2"


def test_loopback_name_of_rank_0_yields_its_address_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    store.set(AWAY, "10.0.0.2")
    monkeypatch.setattr(interfaces, "address_towards", {"hal01": "127.0.1.1", "10.0.0.2": "10.0.0.1"}.__getitem__)
    monkeypatch.setattr(interfaces, "_interface", {"10.0.0.1": "eth1"}.__getitem__)
    choose_interface(APART, store, "hal01")
    assert _chosen() == ("eth1", None)


def test_an_address_leads_to_its_interface() -> None:
    assert interfaces._interface(interfaces.address_towards("127.0.0.1")) == "lo"
    with pytest.raises(OSError, match="no network interface has the address"):
        interfaces._interface("192.0.2.1")


@pytest.mark.parametrize(
    ("name", "means", "own", "at"),
    [
        ("node1", ["10.0.0.1"], [("eth0", "10.0.0.1"), ("ib0", "10.1.0.1")], "10.0.0.1"),
        ("node1", ["10.2.0.9", "10.1.0.1"], [("eth0", "10.0.0.1"), ("ib0", "10.1.0.1")], "10.1.0.1"),
        ("node1", ["127.0.1.1"], [("eth0", "10.0.0.1"), ("docker0", "172.17.0.1")], "10.0.0.1"),
        ("node1", ["127.0.1.1"], [("eth0", "10.0.0.1"), ("eth0", "fd00::1")], "10.0.0.1"),
        ("node1", ["127.0.1.1"], [("eth0", "10.0.0.1"), ("ib0", "10.1.0.1")], EVERYWHERE),
        ("node1", ["127.0.1.1"], [], EVERYWHERE),
        ("localhost", ["::1", "127.0.0.1"], [("eth0", "10.0.0.1")], LOOPBACK),
        ("127.0.0.1", ["127.0.0.1"], [("eth0", "10.0.0.1")], LOOPBACK),
    ],
)
def test_rank_0_listens_on_one_address_wherever_it_can(
    name: str, means: list[str], own: list[tuple[str, str]], at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interfaces, "addresses", lambda only: own)
    infos = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (address, 0)) for address in means]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: infos)
    assert interfaces.listening_address(name) == at


def test_a_store_listens_on_its_address_alone() -> None:
    _store, port = serve_store("127.0.0.2")
    mine = psutil.Process().net_connections("tcp")
    listening = [each.laddr for each in mine if each.status == psutil.CONN_LISTEN]
    assert ("127.0.0.2", port) in listening
    assert not [address for address in listening if address.port == port and address.ip != "127.0.0.2"]
