"""What `lockstep doctor -H` makes of the hosts' reports."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore, ProcessGroupGloo, Store

from lockstep.errors import ConfigError, bit_rate
from lockstep.launch import hosts_doctor
from lockstep.launch.hosts_doctor import (
    HostFacts,
    Link,
    Report,
    cut_links,
    groups,
    measure,
    own_nccl_log,
    plan_probe,
    show,
    troubles,
)
from lockstep.launch.plan.options import LaunchOptions
from lockstep.launch.plan.site_profiles import Site
from lockstep.launch.staging.stage_options import StageOptions

A = HostFacts("a", {"Lockstep": "1", "Python": "3.11.7", "torch": "2.15"}, [], "eth0", "10.0.0.1", [], [])
B = replace(A, host="b", address="10.0.0.2")
LINK = Link(["a", "b"], 1e-4, 9e9)


def test_hosts_in_order_are_left_in_peace(capsys: pytest.CaptureFixture[str]) -> None:
    assert show(Report([A, B], [LINK])) == []
    said = capsys.readouterr().out
    assert "0.10 ms" in said
    assert "9 Gbit/s" in said
    assert "No problems found." in said


@pytest.mark.parametrize(
    ("host", "link", "words"),
    [
        ({"fixes": ["/dev/shm: enlarge it"]}, {}, ("b: /dev/shm: enlarge it",)),
        ({}, {"bits_per_second": 50e6}, ("a and b: 50 Mbit/s is slow", "16.0 s per step", "check cable")),
        ({"others": ["ib0"]}, {"bits_per_second": 50e6}, ("--interface", "ib0")),
        ({}, {"latency_seconds": 0.012}, ("a and b: a small all-reduce takes 12.0 ms",)),
        ({}, {"error": "timed out"}, ("a and b: no connection (timed out)", "firewall")),
    ],
    ids=["found there", "slow", "another network", "far", "firewall"],
)
def test_what_is_wrong_is_one_line_with_the_fix(
    host: dict[str, object], link: dict[str, object], words: tuple[str, ...]
) -> None:
    (line,) = troubles(Report([A, replace(B, **host)], [replace(LINK, **link)]))  # type: ignore[arg-type]
    for each in words:
        assert each in line


def test_a_host_without_gpus_among_others_is_named() -> None:
    (line,) = troubles(Report([A, replace(B, gpus=["H200"] * 8)], [LINK]))
    assert line.startswith("a: torch finds no GPU, while b has 8")


def test_each_host_is_measured_with_every_other() -> None:
    assert groups(1) == []
    assert groups(2) == [[0, 1]]
    assert groups(3) == [[0, 1], [1, 2], [2, 0], [0, 1, 2]]


def test_hosts_that_do_not_reach_each_other_are_paired() -> None:
    assert cut_links([A, B], [set(), set()]) == []
    (link,) = cut_links([A, B, replace(A, host="c", address="10.0.0.3")], [set(), {2}, {1}])
    assert link.hosts == ["b", "c"]
    assert link.error == "b cannot reach 10.0.0.3, c cannot reach 10.0.0.2"


def test_there_is_one_worker_a_host() -> None:
    plan = plan_probe(LaunchOptions(hosts="alpha:4,beta:2", python="/opt/python"))
    assert [(node.host, node.workers) for node in plan.nodes] == [("alpha", 1), ("beta", 1)]
    assert plan.command == ("/opt/python", "-m", "lockstep.launch.hosts_doctor")


def test_rates_are_in_the_units_of_networks() -> None:
    assert [bit_rate(each) for each in (50e6, 999.6e6, 25e9)] == ["50 Mbit/s", "1 Gbit/s", "25 Gbit/s"]


def test_the_link_is_measured_by_the_gpus_own_library(accelerators: Callable[..., None]) -> None:
    """Between two members, with Gloo in the library's place and the CPU in the GPU's."""
    asked, store = [], HashStore()

    def group(store: Store, rank: int, size: int, device: torch.device, timeout: timedelta) -> Any:
        asked.append(device)
        return ProcessGroupGloo(store, rank, size, timeout)

    accelerators(group=group, kind=None)
    with ThreadPoolExecutor(2) as pool:
        links = list(pool.map(lambda member: measure(store, "x", ["a", "b"], member, "xccl"), range(2)))
    assert asked == [torch.device("cpu")] * 2
    for link in links:
        assert (link.library, link.error) == ("xccl", "")
        assert link.bits_per_second > 0


def test_a_library_that_never_answers(accelerators: Callable[..., None]) -> None:
    ended = threading.Event()

    def hang(*_: Any) -> None:
        ended.wait()
        raise RuntimeError("aborted")

    accelerators(group=hang, kind=None)
    assert measure(HashStore(), "x", ["a", "b"], 0, "nccl", seconds=0.05).error == "no answer within 0.1 s"
    ended.set()


def test_each_library_has_its_own_fastest_link() -> None:
    links = [LINK, replace(LINK, bits_per_second=200e9, library="nccl")]
    assert troubles(Report([A, B], links)) == []
    slow = replace(LINK, hosts=["b", "c"], bits_per_second=20e9, library="nccl")
    (line,) = troubles(Report([A, B, replace(A, host="c")], [*links, slow]))
    assert line.startswith("b and c over nccl: 20 Gbit/s is slow")


NCCL = "a:7:7 [0] NCCL INFO "


def test_network_between_the_gpus_is_that_of_their_log(capsys: pytest.CaptureFixture[str]) -> None:
    lines = ("NCCL version 2.27.3+cuda12.9", "Bootstrap: Using hsn0:10.0.0.1<0>", "Using network Socket")
    log = [NCCL + line for line in lines]
    report = Report([A, B], [LINK], log)
    site = Site(name="x", plugin=("Libfabric",), interfaces=("hsn",), source="page", date="2026-01-01")
    (line,) = show(report, site)
    assert line.startswith("NCCL uses the network Socket instead of Libfabric")
    assert "Between GPUs: network Socket; interface hsn0; provider not named; NCCL 2.27.3" in capsys.readouterr().out
    assert troubles(report) == []
    assert troubles(Report([A, B], [LINK]), site) == []


def test_own_log_is_read_if_there_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DEBUG_FILE", str(tmp_path / "nccl"))
    assert own_nccl_log() == []
    (tmp_path / "nccl").write_text(f"{NCCL}Using network IB\n" * 3000)
    assert own_nccl_log() == [f"{NCCL}Using network IB"] * 2000


def test_staging_is_refused() -> None:
    with pytest.raises(ConfigError, match="doctor copies no files; remove --stage"):
        hosts_doctor.plan_probe(LaunchOptions(staging=StageOptions("environment")))
