"""The elastic driver's decisions, and its script that lists hosts."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from lockstep.errors import ConfigError
from lockstep.launch.controller import discovery
from lockstep.launch.controller.discovery import Discovery, discover
from lockstep.launch.controller.elastic_driver import Driver, HostSlot, JobFailedError, SlotWorker, rank_info, ranked
from lockstep.launch.node import parent_death
from lockstep.launch.plan.hosts import Host
from lockstep.launch.plan.options import ElasticRules
from lockstep.world.elastic_rendezvous import CHANGES, answer_key, ask_key, worker_name


def _worker(slot: int, host: str = "a") -> SlotWorker:
    nothing: Any = None
    return SlotWorker(HostSlot(host, slot), f"{host}/{slot}/0", nothing)


def test_the_first_workers_are_ranked_by_slot() -> None:
    zero, one, two = workers = [_worker(slot) for slot in range(3)]
    assert ranked([], [two, zero, one]) == workers


def test_survivors_keep_their_order_before_new_workers() -> None:
    zero, one, two = _worker(0), _worker(1), _worker(2)
    again, three = _worker(0), _worker(3)
    second = ranked([zero, one, two], [again, one, two, three])
    assert second == [one, two, again, three]
    assert ranked(second, [three, again, two]) == [two, again, three]


def test_ranks_go_host_by_host_from_that_of_the_first_survivor() -> None:
    lost, first, second = _worker(0, "a"), _worker(0, "b"), _worker(1, "b")
    new, other = _worker(0, "a"), _worker(2, "b")
    assert ranked([lost, first, second], [new, second, first, other]) == [first, second, other, new]


def test_survivor_keeps_its_local_rank_and_so_its_gpu() -> None:
    rows = [list(info.values()) for info in rank_info([HostSlot("b", 1), HostSlot("b", 3), HostSlot("a", 0)])]
    assert rows == [[0, 3, 1, 2, 0], [1, 3, 3, 2, 0], [2, 3, 0, 1, 1]]


class Puppet:
    """A worker that does what the test says."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        self.variables = variables
        self.how: str | None = None
        self.rank: int | None = None

    def poll(self) -> str | None:
        return self.how

    def end(self, number: signal.Signals) -> None:
        self.how = self.how or "was ended"

    def take_rank(self, rank: int) -> None:
        self.rank = rank


class Job:
    """A driver, its puppets by slot, and the hosts that it may have."""

    def __init__(self, rules: ElasticRules, **hosts: int) -> None:
        self.hosts = hosts
        self.puppets: dict[HostSlot, Puppet] = {}
        self.driver = Driver(rules, lambda: [Host(*host) for host in self.hosts.items()], self._start)

    def _start(self, slot: HostSlot, variables: Mapping[str, str]) -> Puppet:
        self.puppets[slot] = Puppet(variables)
        return self.puppets[slot]

    def step(self) -> bool:
        return self.driver.step()

    def asks(self, slot: HostSlot, after: int = 0) -> None:
        name = self.name(slot)
        self.driver._store.set(ask_key(name), str(after))

    def name(self, slot: HostSlot) -> str:
        life = self.puppets[slot].variables["TORCHELASTIC_RESTART_COUNT"]
        return worker_name(slot.host, slot.number, life)

    def answer(self, slot: HostSlot, after: int = 0) -> Any:
        key = answer_key(self.name(slot), after)
        return json.loads(self.driver._store.get(key)) if self.driver._store.check([key]) else None

    def meet(self, after: int = 0) -> None:
        """All that live ask, those before in the generation `after`."""
        self.step()
        for slot, puppet in self.puppets.items():
            if puppet.how is None:
                self.asks(slot, 0 if puppet.rank is None else after)
        self.step()


A, B, C = HostSlot("a", 0), HostSlot("a", 1), HostSlot("b", 0)


def test_workers_of_two_hosts_meet_and_a_lost_host_is_replaced() -> None:
    job = Job(ElasticRules(initial=3, minimum=2), a=2, b=1)
    job.meet()
    assert {name: job.puppets[C].variables[f"HOROVOD_{name}"] for name in ("RANK", "LOCAL_SIZE", "CROSS_RANK")} == {
        "RANK": "2",
        "LOCAL_SIZE": "1",
        "CROSS_RANK": "1",
    }
    cross = [[job.puppets[slot].variables[f"HOROVOD_CROSS_{what}"] for what in ("RANK", "SIZE")] for slot in (A, B, C)]
    assert cross == [["0", "2"], ["0", "1"], ["1", "2"]]  # counted among the hosts that have this slot
    answer = job.answer(B)
    assert [answer[key] for key in ("rank", "size", "local_rank", "local_size", "node")] == [1, 3, 1, 2, 0]
    job.puppets[A].how = job.puppets[B].how = "has lost its host"
    del job.hosts["a"]
    job.hosts["c"] = 1
    job.meet(after=1)
    new = HostSlot("c", 0)
    assert [job.puppets[slot].rank for slot in (C, new)] == [0, 1]
    assert (job.answer(C, 1)["node"], job.answer(new)["node"]) == (0, 1)
    assert job.driver._store.get(CHANGES) == b"2 2 1"
    job.puppets[C].how = job.puppets[new].how = ""
    assert not job.step() or job.step()
    assert [worker.slot for worker in job.driver.finished] == [C, new]


def test_a_worker_that_has_not_met_is_ended_when_its_host_goes() -> None:
    job = Job(ElasticRules(initial=1, minimum=1), a=1, b=1)
    job.step()
    job.asks(A)
    del job.hosts["b"]
    job.step()
    assert job.puppets[C].how == "was ended"
    job.step()
    assert job.answer(A)["size"] == 1


def test_hosts_in_another_order_end_no_worker_that_is_starting() -> None:
    job = Job(ElasticRules(initial=2, minimum=1, maximum=2), a=2, b=2)
    job.step()
    job.hosts = {"b": 2, "a": 2}
    job.meet()
    assert {slot: puppet.rank for slot, puppet in job.puppets.items()} == {A: 0, B: 1}
    assert job.driver._store.get(CHANGES) == b"2"


def test_survivors_come_first_up_to_the_maximum() -> None:
    job = Job(ElasticRules(initial=2, minimum=1, maximum=2), a=1, b=2)
    job.meet()
    assert sorted(job.puppets) == [A, C]
    job.puppets[A].how = "failed with exit code 1"
    job.hosts = {"c": 5, **job.hosts}
    job.meet(after=1)
    assert job.puppets[C].rank == 0
    assert sorted(slot for slot, puppet in job.puppets.items() if puppet.how is None) == [C, HostSlot("c", 0)]


def test_slot_whose_workers_never_join_ends_the_job() -> None:
    job = Job(ElasticRules(initial=2, minimum=1), a=2)
    job.meet()
    job.puppets[B].how = "failed with exit code 7"
    with pytest.raises(JobFailedError, match="3 consecutive workers in this slot exited before joining"):  # noqa: PT012
        for _ in range(4):
            job.step()
            job.puppets[B].how = "failed with exit code 7"


@pytest.mark.cold
def test_slow_script_is_killed_with_its_descendants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "SCRIPT_SECONDS", 0.5)
    began = time.monotonic()
    with pytest.raises(ConfigError, match=r"took longer than 0\.5 s"):
        Discovery(partial(discover, "sleep 30 & sleep 30", None))
    assert time.monotonic() - began < 10


@pytest.mark.cold
def test_bytes_that_are_no_text_are_an_error_like_others() -> None:
    with pytest.raises(ConfigError, match="host:slots"):
        Discovery(partial(discover, r"printf '\377\n'", None))


@pytest.fixture
def untied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run scripts by the shell alone, which starts no Python."""
    monkeypatch.setattr(parent_death, "command", list)


def _ends(pid: Path) -> bool:
    """Whether a process, named in a file, ends before the script's time is over."""
    with suppress(psutil.NoSuchProcess):
        psutil.Process(int(pid.read_text())).wait(discovery.SCRIPT_SECONDS / 2)
    return not psutil.pid_exists(int(pid.read_text()))


@pytest.mark.usefixtures("untied")
def test_a_daemon_that_keeps_the_streams_open_is_not_waited_for(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    try:
        assert discover(f"setsid sleep 1000 & echo $! >{pid}; echo localhost:2", None) == (Host("localhost", 2),)
    finally:
        os.kill(int(pid.read_text()), signal.SIGKILL)


@pytest.mark.usefixtures("untied")
def test_script_that_opens_its_stdout_again_loses_no_host() -> None:
    hosts = discover("echo a:1 >/dev/stdout; echo b:1 >/dev/stdout", None)
    assert hosts == (Host("a", 1), Host("b", 1))


@pytest.mark.usefixtures("untied")
def test_endless_output_is_bounded_and_its_process_killed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"printed more than 1,048,576 bytes"):
        discover("yes localhost:2", None)
    pid = tmp_path / "pid"
    assert discover(f"yes >&2 & echo $! >{pid}; echo localhost:2", None) == (Host("localhost", 2),)
    assert _ends(pid)


@pytest.mark.usefixtures("untied")
def test_script_still_running_is_killed_with_its_descendants(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    later = f"sleep 1000 & echo $! >{pid}.part; mv {pid}.part {pid}; wait"
    script = f"if test -e {tmp_path}/asked; then {later}; fi; touch {tmp_path}/asked; echo localhost:2"
    found = Discovery.by_script(script, None)
    while not pid.exists():
        time.sleep(0.01)
    try:
        found.stop()
        assert _ends(pid)
        assert found.hosts == (Host("localhost", 2),)
    finally:
        with suppress(ProcessLookupError):
            os.kill(int(pid.read_text()), signal.SIGKILL)
