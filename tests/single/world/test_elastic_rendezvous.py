"""Asking for a place in an elastic job, with a store in this process for the launcher's."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

from lockstep.errors import WorldError
from lockstep.world import elastic_rendezvous
from lockstep.world.elastic_rendezvous import ADDED, CHANGES, REMOVED, _Latest, answer_key, ask_key, host_changes, meet
from lockstep.world.launcher_environment import RankInfo
from lockstep.world.rendezvous import serve_store

WORKER = "localhost/2/1"


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    store, port = serve_store()
    for name, value in {
        "HOROVOD_ELASTIC": "1",
        "HOROVOD_HOSTNAME": "localhost",
        "HOROVOD_LOCAL_RANK": "2",
        "TORCHELASTIC_RESTART_COUNT": "1",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        "HOROVOD_ELASTIC_TIMEOUT": "5",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(elastic_rendezvous, "_latest", _Latest())
    yield store
    elastic_rendezvous._changes_store.cache_clear()


def _answer(store: Any, after: int, **answer: int) -> None:
    store.set(
        answer_key(WORKER, after),
        json.dumps({"local_size": answer.get("size", 0), "node": 0, **answer} if answer else {}),
    )


def test_a_worker_asks_and_gets_its_place_and_then_the_next(launcher: Any) -> None:
    generation_store, port = serve_store()
    generation_store.set("shared", "here")
    _answer(launcher, 0, generation=3, rank=1, size=4, local_rank=2, local_size=3, node=1, port=port, changes=0)
    meeting = meet()
    assert meeting.rank_info == RankInfo(1, 4, 2, 3, 1, "horovodrun")
    assert meeting.generation == 3
    assert meeting.store.get("shared") == b"here"
    assert launcher.get(ask_key(WORKER)) == b"0"
    _answer(launcher, 3, generation=4, rank=0, size=2, local_rank=1, port=port, changes=0)
    assert meet().rank_info.rank == 0
    assert elastic_rendezvous.latest_place() == (0, 2)
    assert launcher.get(ask_key(WORKER)) == b"3"


def test_a_generation_that_is_lost_already_is_left_at_once(launcher: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elastic_rendezvous, "CONNECTING", timedelta(seconds=0.2))
    closed, closed_port = serve_store()
    del closed
    _store, port = serve_store()
    _answer(launcher, 0, generation=1, rank=1, size=2, local_rank=1, port=closed_port, changes=0)
    _answer(launcher, 1, generation=2, rank=0, size=1, local_rank=0, port=port, changes=0)
    meeting = meet()
    assert (meeting.generation, meeting.rank_info.rank) == (2, 0)
    assert launcher.get(ask_key(WORKER)) == b"1"


def test_a_worker_that_is_not_needed_ends_well(launcher: Any) -> None:
    _answer(launcher, 0)
    with pytest.raises(SystemExit) as ended:
        meet()
    assert ended.value.code == 0


def test_no_place_in_time_is_an_error(launcher: Any) -> None:
    with pytest.raises(WorldError, match=r"slot 2 on localhost was not assigned a rank within 0\.2 s"):
        meet({**os.environ, "HOROVOD_ELASTIC_TIMEOUT": "0.2"})


def test_a_place_needs_a_launcher() -> None:
    with pytest.raises(WorldError, match=r"HOROVOD_GLOO_RENDEZVOUS_ADDR.*horovodrun --min-np"):
        meet({"HOROVOD_ELASTIC": "1"})


def test_outside_an_elastic_job_hosts_never_change() -> None:
    assert host_changes(0) == (0, 0)


def test_changes_are_reported_since_a_number_and_a_meeting(launcher: Any) -> None:
    launcher.set(CHANGES, "")
    assert host_changes(0) == (0, 0)
    launcher.set(CHANGES, f"{ADDED} {REMOVED}")
    assert host_changes(0) == (2, ADDED | REMOVED)
    assert host_changes(1) == (2, REMOVED)
    assert host_changes(2) == (2, 0)
    store, port = serve_store()
    _answer(launcher, 0, generation=1, rank=0, size=1, local_rank=0, port=port, changes=2)
    assert meet().store.num_keys() == store.num_keys()
    assert host_changes(0) == (2, 0)
    launcher.set(CHANGES, f"{ADDED} {REMOVED} {ADDED}")
    assert host_changes(0) == (3, ADDED)
