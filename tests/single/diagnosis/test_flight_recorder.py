"""Collectives from torch's records, with a stand-in for torch."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch.testing._internal.distributed.fake_pg  # the backend "fake"

from lockstep.diagnosis import flight_recorder
from lockstep.diagnosis.flight_recorder import RecordedCollective

GLOO = {"0": {"last_enqueued_collective": "9", "last_completed_collective": "8"}}


def entry(number: int, name: str, retired: bool, group: str = "0", **more: Any) -> dict[str, Any]:
    return {
        "collective_seq_id": number,
        "profiling_name": name,
        "retired": retired,
        "state": "scheduled",
        "process_group": [group, "default_pg"],
        "input_sizes": [[10], []],
        "input_dtypes": ["Float", "Long"],
        **more,
    }


@contextmanager
def group_of(backends: str) -> Iterator[None]:
    """A process group of this process alone."""
    torch.distributed.init_process_group(backends, store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


@pytest.fixture
def records(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """What torch's dump returns while this process has a group of Gloo."""
    found: dict[str, Any] = {"pg_status": dict(GLOO)}

    def dump(includeCollectives: bool) -> bytes:
        return json.dumps(found if includeCollectives else {"pg_status": found["pg_status"]}).encode()

    with group_of("gloo"):
        monkeypatch.setitem(sys.modules, "torch._C._distributed_c10d", SimpleNamespace(_dump_fr_trace_json=dump))
        yield found
        monkeypatch.undo()


def test_the_numbers_are_summed_over_groups(records: dict[str, Any]) -> None:
    assert flight_recorder.counts() == (10, 9)
    records["pg_status"]["1"] = {"last_enqueued_collective": "0", "last_completed_collective": "-1"}
    assert flight_recorder.counts() == (11, 9)


def test_the_last_finished_and_the_unfinished_collectives_count(records: dict[str, Any]) -> None:
    records["entries"] = [
        *(entry(number, "gloo:all_reduce", True) for number in range(1, 8)),
        entry(8, "nccl:broadcast", False, state="completed"),
        entry(9, "gloo:all_reduce", False),
        entry(1, "gloo:send", False, is_p2p=True),
        entry(4, "gloo:barrier", False, "mine", input_sizes=[], input_dtypes=[]),
    ]
    assert flight_recorder.latest() == [
        RecordedCollective("0", 8, "broadcast", "float[10], long[]", True),
        RecordedCollective("0", 9, "all_reduce", "float[10], long[]", False),
        RecordedCollective("mine", 4, "barrier", "", False),
    ]


def test_all_recorders_of_torch_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """In torch 2.15, a group of Gloo and NCCL is in the recorders of both, which number its collectives each."""
    own = {"0": {"last_enqueued_collective": "5", "last_completed_collective": "4"}}
    known = {
        "gloo": {"pg_status": GLOO, "entries": [entry(9, "gloo:all_reduce", False)]},
        "nccl2": {"pg_status": own, "entries": [entry(4, "nccl:all_reduce", True), entry(5, "nccl:all_reduce", False)]},
        "fake": {"pg_status": own, "entries": []},
    }

    def dump(includeCollectives: bool, backend: str = "gloo") -> bytes:
        return json.dumps(known.get(backend, {})).encode()

    with group_of("cpu:gloo,cuda:fake"), monkeypatch.context() as patched:
        patched.setitem(sys.modules, "torch._C._distributed_c10d", SimpleNamespace(_dump_fr_trace_json=dump))
        assert flight_recorder.counts() == (10 + 6 + 6, 9 + 5 + 5)
        assert [(each.group, each.number, each.is_finished) for each in flight_recorder.latest()] == [
            ("0", 9, False),
            ("0/nccl2", 4, True),
            ("0/nccl2", 5, False),
        ]


def test_collectives_that_not_all_are_recorded_have_no_number(
    records: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert flight_recorder.started() == 10
    records["pg_status"] = {}
    assert flight_recorder.started() == 0
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "0")
    assert flight_recorder.started() is None


def test_both_recorders_of_earlier_torch_are_read(records: dict[str, Any]) -> None:
    nccl = {"pg_status": {"0": {"last_enqueued_collective": "5", "last_completed_collective": "5"}}}
    sys.modules["torch._C._distributed_c10d"]._dump_nccl_trace_json = (  # type: ignore[attr-defined]
        lambda includeCollectives: json.dumps(nccl).encode()
    )
    assert flight_recorder.counts() == (10 + 6, 9 + 6)


def test_backend_that_nothing_records_has_no_number() -> None:
    with group_of("cpu:gloo,cuda:fake"):
        assert flight_recorder.started() is None


def test_without_records_nothing_is_known(records: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    records["pg_status"] = {}
    assert flight_recorder.counts() is None
    assert flight_recorder.latest() == []

    def fails(includeCollectives: bool) -> bytes:
        raise RuntimeError("not built")

    monkeypatch.setitem(sys.modules, "torch._C._distributed_c10d", SimpleNamespace(_dump_nccl_trace_json=fails))
    assert flight_recorder.counts() is None


def test_this_process_has_no_group() -> None:
    assert not flight_recorder.has_group()
