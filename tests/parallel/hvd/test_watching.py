"""What can be seen from outside: the stall report, the timeline, and how little an idle worker does."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import time
from pathlib import Path

import pytest
import torch
from kept_lines import KeptLines
from worker_group import on_workers, run_in_workers

from lockstep import hvd
from lockstep.world.world import World


def test_the_stall_report_names_tensors_and_missing_ranks() -> None:
    reported = [multiprocessing.Event() for _ in range(3)]

    def work(world: World) -> list[str]:
        os.environ["HOROVOD_STALL_CHECK_TIME_SECONDS"] = "0.5"
        kept = KeptLines(reported[world.rank])
        logging.getLogger("lockstep.hvd").addHandler(kept)
        hvd.init()
        if hvd.rank() == 1:
            other = hvd.allreduce_async(torch.ones(1), name="else")
        if hvd.rank() > 0:
            assert all(event.wait(60) for event in reported[:2])
        hvd.allreduce(torch.ones(1), name="late")
        if hvd.rank() != 1:
            other = hvd.allreduce_async(torch.ones(1), name="else")
        hvd.synchronize(other)
        hvd.shutdown()
        return kept.lines

    first, second, third = run_in_workers(3, work)
    assert any("allreduce.late" in line and "Missing ranks: 1, 2." in line for line in first)
    assert any("allreduce.else" in line and "Missing ranks: 0, 2." in line for line in second)
    assert third == []


def test_a_joined_worker_is_not_missing() -> None:
    reported = [multiprocessing.Event() for _ in range(3)]

    def work(world: World) -> list[str]:
        os.environ["HOROVOD_STALL_CHECK_TIME_SECONDS"] = "0.5"
        kept = KeptLines(reported[world.rank])
        logging.getLogger("lockstep.hvd").addHandler(kept)
        hvd.init()
        if hvd.rank() == 0:
            hvd.join()
        else:
            assert hvd.rank() == 1 or reported[1].wait(60)
            hvd.allreduce(torch.ones(1), name="late")
            hvd.join()
        hvd.shutdown()
        return kept.lines

    first, second, third = run_in_workers(3, work)
    assert first == third == []
    assert any("Missing ranks: 2." in line for line in second)


@pytest.mark.parametrize("warning", ["0.2", "1"])
def test_stall_shuts_the_job_down_if_requested_after_a_warning(warning: str) -> None:
    def work(world: World) -> tuple[str, float, list[str]]:
        os.environ["HOROVOD_STALL_CHECK_TIME_SECONDS"] = warning
        os.environ["HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"] = "1"
        kept = KeptLines()
        logging.getLogger("lockstep.hvd").addHandler(kept)
        hvd.init()
        start = time.monotonic()
        with pytest.raises(hvd.HorovodInternalError, match=r"STALL_SHUTDOWN_TIME|disconnected") as error:
            hvd.allreduce(torch.ones(1), name=f"of {hvd.rank()}")
        return str(error.value), time.monotonic() - start, kept.lines

    outcomes = run_in_workers(2, work)
    stopped = [rank for rank, (text, _, _) in enumerate(outcomes) if "STALL_SHUTDOWN_TIME" in text]
    assert stopped  # who looks later may find the other gone
    for rank in stopped:
        assert f"Missing ranks: {1 - rank}. Submitted by ranks: {rank}." in outcomes[rank][0]
        assert outcomes[rank][1] > 0.5
        assert any(f"allreduce.of {rank} has waited" in line for line in outcomes[rank][2])


def test_the_timeline_is_a_chrome_trace(tmp_path: Path) -> None:
    def work(world: World) -> None:
        os.environ["HOROVOD_TIMELINE"] = str(tmp_path / "whole.json")
        os.environ["HOROVOD_TIMELINE_MARK_CYCLES"] = "1"
        hvd.init()
        handles = [hvd.allreduce_async(torch.ones(1000), name=f"grad.{index}") for index in range(5)]
        for handle in handles:
            hvd.synchronize(handle)
        hvd.broadcast(torch.ones(3), 0, name="weights")
        hvd.shutdown()

    run_in_workers(2, work)
    events = json.loads((tmp_path / "whole.json").read_text())
    lines = {event["args"]["name"]: event["tid"] for event in events if event["name"] == "thread_name"}
    assert set(lines) >= {*(f"allreduce.grad.{index}" for index in range(5)), "broadcast.weights"}
    for name, kind in (("allreduce.grad.3", "ALLREDUCE"), ("broadcast.weights", "BROADCAST")):
        spans = {event["name"]: event for event in events if event["tid"] == lines[name] and event["ph"] == "X"}
        waited, worked = spans[f"NEGOTIATE_{kind}"], spans[kind]
        assert waited["ts"] + waited["dur"] == pytest.approx(worked["ts"], abs=2)
        assert worked["dur"] >= 0
    assert any(event["name"] == "CYCLE_START" for event in events)


def test_the_timeline_starts_and_stops_on_demand(tmp_path: Path) -> None:
    def work(world: World) -> None:
        hvd.init()
        with pytest.raises(ValueError, match="DYNAMIC"):
            hvd.start_timeline(str(tmp_path / "no.json"))
        hvd.stop_timeline()
        hvd.shutdown()
        os.environ["HOROVOD_TIMELINE"] = "DYNAMIC"
        hvd.init()
        for turn in range(2):
            hvd.start_timeline(str(tmp_path / f"part{turn}.json"))
            hvd.allreduce(torch.ones(1), name=f"x{turn}")
            hvd.stop_timeline()
            hvd.allreduce(torch.ones(1), name="unseen")
        hvd.stop_timeline()
        if hvd.rank() == 0:
            with pytest.raises(ValueError, match="cannot write the timeline"):
                hvd.start_timeline(str(tmp_path / "missing" / "x.json"))
        hvd.shutdown()
        with pytest.raises(ValueError, match="has not been initialized"):
            hvd.start_timeline(str(tmp_path / "no.json"))
        with pytest.raises(ValueError, match="has not been initialized"):
            hvd.stop_timeline()

    run_in_workers(2, work)
    for turn in range(2):
        text = (tmp_path / f"part{turn}.json").read_text()
        assert f'"allreduce.x{turn}"' in text
        assert "unseen" not in text
        json.loads(text)
    assert not (tmp_path / "no.json").exists()


@on_workers(2)
def test_idle_and_waiting_workers_use_no_cpu() -> None:
    os.environ |= {"HOROVOD_STALL_CHECK_DISABLE": "1", "LOCKSTEP_STRAGGLER_SECONDS": "0"}  # they run periodically
    hvd.init()
    hvd.allreduce(torch.ones(1))
    time.sleep(0.2)
    start = time.process_time()
    time.sleep(1)
    idle = time.process_time() - start
    hvd.barrier()
    start = time.process_time()
    if hvd.rank() == 0:
        hvd.allreduce(torch.ones(1), name="wait")
    else:
        time.sleep(1)
        hvd.allreduce(torch.ones(1), name="wait")
    idle, waiting = (idle, time.process_time() - start)
    assert idle < 0.1
    assert waiting < 0.2
