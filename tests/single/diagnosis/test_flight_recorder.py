"""Collectives from torch's records, with a stand-in for torch."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.diagnosis import flight_recorder
from lockstep.diagnosis.flight_recorder import RecordedCollective


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


@pytest.fixture
def records(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What torch's dump returns."""
    found: dict[str, Any] = {"pg_status": {"0": {"last_enqueued_collective": "9", "last_completed_collective": "8"}}}

    def dump(includeCollectives: bool) -> bytes:
        return json.dumps(found if includeCollectives else {"pg_status": found["pg_status"]}).encode()

    module = SimpleNamespace(_dump_fr_trace_json=dump)
    monkeypatch.setitem(sys.modules, "torch._C._distributed_c10d", module)
    monkeypatch.setattr(flight_recorder, "has_group", lambda: True)
    return found


def test_the_numbers_are_summed_over_groups(records: dict[str, Any]) -> None:
    assert flight_recorder.counts() == (9, 8)
    records["pg_status"]["1"] = {"last_enqueued_collective": "3", "last_completed_collective": "-1"}
    assert flight_recorder.counts() == (12, 8)


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


def test_without_records_nothing_is_known(records: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    records["pg_status"] = {}
    assert flight_recorder.counts() is None
    assert flight_recorder.latest() == []

    def fails(includeCollectives: bool) -> bytes:
        raise RuntimeError("not built")

    monkeypatch.setitem(sys.modules, "torch._C._distributed_c10d", SimpleNamespace(_dump_nccl_trace_json=fails))
    assert flight_recorder.counts() is None
    monkeypatch.setattr(flight_recorder, "has_group", lambda: False)
    assert flight_recorder.counts() is None


def test_this_process_has_no_group() -> None:
    assert not flight_recorder.has_group()
