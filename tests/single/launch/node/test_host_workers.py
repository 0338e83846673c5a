"""What a host adds to its workers' variables."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.launch.node.host_workers import Seats
from lockstep.world.interfaces import LOOPBACK_INTERFACE

NAMES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def variables(
    interface: str,
    monkeypatch: pytest.MonkeyPatch,
    only: str = "",
    loopback: bool = False,
    own: Sequence[str] = (),
    **given: str,
) -> list[str | None]:
    """The interfaces of Gloo and NCCL on a host whose interface `interface` leads to the others."""
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    nothing: Any = None
    job: Any = SimpleNamespace(
        is_elastic=False,
        host="a",
        workers=2,
        interfaces=only.split(",") if only else [],
        environment=given,
        loopback=loopback,
    )
    this = Seats(job, nothing, lambda: [(name, "10.0.0.1") for name in own])
    return [this.variables(interface).get(name) for name in NAMES]


@pytest.mark.parametrize(
    ("interface", "own", "nccl"),
    [
        (LOOPBACK_INTERFACE, ["eth0", "eth1"], f"={LOOPBACK_INTERFACE}"),
        ("eth1", ["eth1"], "=eth1"),  # without "=" eth10 would match, too
        ("eth1", ["eth1", "eth1", "docker0"], "=eth1"),
        ("eth1", ["eth1", "eth2"], None),  # NCCL uses both
        ("eth1", ["eth1", "ib0"], None),
        ("docker0", ["docker0", "eth0"], None),
    ],
)
def test_nccl_uses_one_interface_only_if_there_is_one(
    interface: str, own: list[str], nccl: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert variables(interface, monkeypatch, own=own) == [interface, nccl]


def test_nccl_may_use_all_interfaces_that_the_job_is_held_to(monkeypatch: pytest.MonkeyPatch) -> None:
    assert variables("eth1", monkeypatch, only="eth1,eth2") == ["eth1", "=eth1,eth2"]


def test_the_users_choice_of_an_interface_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    assert variables("eth1", monkeypatch, only="eth1", NCCL_SOCKET_IFNAME="ib") == ["eth1", None]
    assert variables("eth1", monkeypatch, only="eth1", GLOO_SOCKET_IFNAME="ib0") == [None, "=eth1"]
    on_one_host = variables(LOOPBACK_INTERFACE, monkeypatch, loopback=True, GLOO_SOCKET_IFNAME="ib0")
    assert on_one_host == [LOOPBACK_INTERFACE, f"={LOOPBACK_INTERFACE}"]
