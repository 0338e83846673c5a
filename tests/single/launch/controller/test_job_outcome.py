"""How the launcher reports failures, errors at the start, and those of a function."""

from __future__ import annotations

import asyncio
import pickle
import re
import signal
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from lockstep.diagnosis.explanation import Explanation
from lockstep.errors import CheckpointError, StoppedError
from lockstep.launch.controller.job_outcome import Failure, JobEnd, JobOutcome, first
from lockstep.launch.controller.job_run import JobRun
from lockstep.launch.controller.remote_node import NodePool, Remote
from lockstep.launch.controller.restarts import ElasticJob, Generations
from lockstep.launch.controller.run_function import PROCESS_FAILED, WORKER_FAILED, results
from lockstep.launch.controller.start_errors import StartError, disagreement, too_late, why_not_started
from lockstep.launch.output import Display, OutputPlan
from lockstep.launch.plan.hosts import Host
from lockstep.launch.plan.job_plan import NodePlan, Transport, plan_job, start_command
from lockstep.launch.plan.options import RestartOptions
from lockstep.launch.protocol.messages import Ended, Failing, PeersLeft, WorkerFailure

PLAN = plan_job(["python"], [Host("a", 1), Host("b", 1)], Transport("ssh"), 1, {})
RAISED = Failure(2, "b", 1, "Traceback ...\nValueError: no", 10.0)
KILLED = Failure(1, "a", -9, time=9.0)
BEREFT = Failure(0, "a", 1, "RuntimeError: Connection closed by peer [10.0.0.2]:1234", 8.0)
TOLD = Failure(3, "b", 1, "error: lost the connection to a peer", 7.0, lost_peer=True)
OBEYED = Failure(4, "b", 75, "stopped by SIGTERM after step 12", 9.7)
GONE = Failure(-1, "c", 1, "lost c: the host or the way to it is down", 9.5)


@pytest.mark.parametrize(
    ("failures", "culprit"),
    [
        ([BEREFT, RAISED, KILLED], RAISED),
        ([BEREFT, KILLED, TOLD], KILLED),
        ([KILLED, GONE], KILLED),
        ([GONE, BEREFT], GONE),
        ([OBEYED, GONE], GONE),
        ([TOLD, BEREFT], TOLD),
    ],
    ids=["an error", "a signal", "the earlier of two losses", "a host", "why others stopped", "nothing better"],
)
def test_the_culprit_is_whom_the_others_follow(failures: list[Failure], culprit: Failure) -> None:
    assert first(failures) == culprit


@pytest.mark.parametrize(
    ("outcome", "cause", "message"),
    [
        (JobOutcome(0), None, ""),
        (JobOutcome(0, apart=True), None, "the 3 workers did not work together: each imported torch, but none"),
        (
            JobOutcome(1, replace(RAISED, log=Path("l/worker-2.log"))),
            {"kind": "worker", "rank": 2, "host": "b", "exit_code": 1, "text": RAISED.text, "log": "l/worker-2.log"},
            "worker 2 of 3 on b failed with exit code 1; the others were stopped",
        ),
        (
            JobOutcome(137, KILLED),
            {"kind": "worker", "rank": 1, "host": "a", "signal": "SIGKILL"},
            "worker 1 of 3 on a was ended by SIGKILL (possibly out of memory); the others were stopped",
        ),
        (
            JobOutcome(168, replace(KILLED, code=-40)),
            {"kind": "worker", "rank": 1, "host": "a", "signal": "signal 40"},
            "worker 1 of 3 on a was ended by signal 40; the others were stopped",
        ),
        (
            JobOutcome(1, Failure(0, "", 0)),
            {"kind": "worker", "rank": 0, "exit_code": 0},
            "worker 0 of 3 exited with code 0 while others still needed it",
        ),
        (
            JobOutcome(1, GONE),
            {"kind": "host", "host": "c", "text": GONE.text},
            f"{GONE.text}; the others were stopped",
        ),
        (
            JobOutcome(8, Failure(1, "b", 8, hung=True)),
            {"kind": "hang", "rank": 1, "host": "b"},
            "the job hung; all workers were stopped",
        ),
        (
            JobOutcome(130, request=signal.SIGINT, killed="all workers were killed"),
            {"kind": "stop", "signal": "SIGINT", "text": "all workers were killed"},
            "stopped by SIGINT; all workers were killed",
        ),
        (
            JobOutcome(75, request=signal.SIGUSR1),
            {"kind": "stop", "signal": "SIGUSR1"},
            "stopped by SIGUSR1 after a checkpoint (exit code 75)",
        ),
        (
            JobOutcome(75, stop_message="stopped before the time limit after step 9"),
            {"kind": "stop", "text": "stopped before the time limit after step 9"},
            "stopped before the time limit after step 9",
        ),
        (
            JobOutcome(3, trouble=StartError("b refuses this user's key", ("b",)), away=("b",)),
            {"kind": "error", "host": "b", "text": "b refuses this user's key"},
            "b refuses this user's key",
        ),
    ],
)
def test_end_has_cause_and_message_for_programs(
    outcome: JobOutcome, cause: dict[str, Any] | None, message: str
) -> None:
    end = JobEnd()
    end.add(outcome, 3)
    none = {"rank": None, "host": "", "exit_code": None, "signal": "", "text": "", "log": ""}
    assert end.cause == (cause and {**none, **cause})
    assert end.message.startswith(message)
    assert bool(end.message) == bool(message)
    assert (end.exit_code, end.workers, end.restarts, end.hangs) == (outcome.code, 3, 0, [])


def test_end_keeps_the_hangs_of_earlier_generations() -> None:
    end = JobEnd(restarts=1)
    end.add(JobOutcome(8, Failure(1, "", 8, hung=True)), 2, [Explanation((1,), ("rank 1 sleeps",), ("a.py:3",))])
    end.add(JobOutcome(0), 2)
    assert (end.exit_code, end.cause, end.restarts) == (0, None, 1)
    assert end.hangs == [{"ranks": (1,), "lines": ("rank 1 sleeps",), "stacks": ("a.py:3",)}]


def _job(*remotes: Any) -> JobRun:
    job = JobRun(PLAN, Display(OutputPlan(2, prefixed=False)), NodePool())
    job._remotes = list(remotes)
    return job


def _remote(node: NodePlan, end: Ended | None, left: PeersLeft | None = None) -> Remote:
    """The node process of a host; it still runs without an `end`."""
    remote = Remote()
    remote.node, remote.left = node, left or PeersLeft()
    remote.end = Future()  # type: ignore[assignment]
    if end:
        remote.end.set_result(end)
    return remote


LOST_PEER = WorkerFailure(1, 1, 0.0, "RuntimeError: Connection closed by peer", lost_peer=True)
RAISED_TOO = WorkerFailure(1, 3, 0.0, "KeyError: 5")
STAYS = {"staying": 1, "must_lead": True}
LEFT_EARLY = "exited with code 0 while others still needed it (an early sys.exit() or return, or fewer batches?)"


@pytest.mark.parametrize(
    ("first", "second", "code", "rank", "goes_on"),
    [
        (PeersLeft((0,)), Ended(), 0, None, False),
        (PeersLeft((0,)), Ended((LOST_PEER,)), 1, 0, True),
        (PeersLeft((0,)), Ended(**STAYS), 1, 0, True),
        (PeersLeft((0,)), Ended((LOST_PEER,), **STAYS), 1, 0, True),
        (PeersLeft((0,)), Ended((RAISED_TOO,)), 3, 1, True),
        (PeersLeft((0,)), Ended((RAISED_TOO,), **STAYS), 3, 1, True),
        (PeersLeft((0,)), Ended((replace(RAISED_TOO, final=True),)), 3, 1, False),
        (PeersLeft(), Ended((LOST_PEER,)), 1, 1, True),
        (PeersLeft(), Ended(**STAYS), 1, None, True),
    ],
)
def test_exit_with_0_is_a_loss_if_others_still_needed_the_worker(
    first: PeersLeft, second: Ended, code: int, rank: int | None, goes_on: bool
) -> None:
    job = _job(*map(_remote, PLAN.nodes, (Ended(), second), (first, PeersLeft())))
    outcome = job._judge([Ended(), second], None)
    assert outcome.code == code
    assert (outcome.culprit.rank if outcome.culprit else None) == rank
    assert outcome.may_succeed_again == goes_on
    assert outcome.must_lead == second.must_lead
    if rank == 0:
        assert f"lockstep: worker 0 of 2 on a {LEFT_EARLY}; " in outcome.message(2)
        assert ("Connection closed by peer" in outcome.message(2)) == (second.failures == (LOST_PEER,))
        assert outcome.exit_code(None) == outcome.exit_code(1) == 1


@pytest.mark.parametrize(
    ("end", "left", "left_early"),
    [
        (Ended(), [PeersLeft((0,)), PeersLeft(joining=True)], True),
        (Ended(), [PeersLeft((0,)), PeersLeft(lost_peer=True)], True),
        (Ended(), [PeersLeft((0,)), PeersLeft()], False),
        (Ended(), [PeersLeft(), PeersLeft(joining=True)], False),
        (None, [PeersLeft((0,)), PeersLeft(joining=True)], False),
        (None, [PeersLeft((0,)), PeersLeft(lost_peer=True)], True),
        (None, [PeersLeft((0,), joining=True), PeersLeft(joining=True)], True),
        (None, [PeersLeft(joining=True), PeersLeft(joining=True)], False),
    ],
)
def test_hosts_notice_together_that_a_worker_has_left(
    end: Ended | None, left: list[PeersLeft], left_early: bool
) -> None:
    job = _job(*map(_remote, PLAN.nodes, [end, None], left))
    job._plan = replace(PLAN, timings=replace(PLAN.timings, look=0.001))

    async def turns() -> bool:
        watching = asyncio.create_task(job._wait_for_early_exit())
        await asyncio.wait([watching], timeout=60.0 if left_early else 0.02)
        watching.cancel()
        return job._left_early

    assert asyncio.run(turns()) == left_early


def test_a_loss_has_the_time_of_its_first_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not that of the end of its generation, which workers that stay may take minutes to leave."""
    known = list[float | None]()

    async def follow() -> None:
        remotes = [Remote() for _ in PLAN.nodes]
        for index, remote in enumerate(remotes):
            remote.take(index, PLAN.nodes[index], lambda *chunk: None)
        job = _job(*remotes)

        async def end_the_others() -> None:
            known.append(job.failed_at)

        monkeypatch.setattr(job, "_end_the_others", end_the_others)
        known.append(job.failed_at)
        remotes[1].answer(Failing).set_result(Failing())
        hanging, leaving = (asyncio.get_running_loop().create_future() for _ in range(2))
        await job._follow_to_the_end(hanging, leaving)  # type: ignore[arg-type]

    asyncio.run(follow())
    assert known[0] is None
    assert known[1] is not None


@pytest.mark.parametrize(
    ("restarts", "can_resize", "is_short"), [(0, False, True), (1, False, False), (0, True, False)]
)
def test_workers_do_not_stay_if_no_generation_follows(restarts: int, can_resize: bool, is_short: bool) -> None:
    options = RestartOptions(max_restarts=restarts, max_np=2)
    job = ElasticJob(PLAN, [], lambda hosts: PLAN, options, can_resize)
    generations = Generations(job, list, Display(OutputPlan(2, prefixed=False)), None)
    timings = generations._numbered(PLAN, ()).timings
    assert (timings.leave == timings.worker_end) == is_short


@pytest.mark.parametrize(
    ("ended", "goes_on", "staying"),
    [
        ([Ended((RAISED_TOO,)), Ended((LOST_PEER,))], False, {}),
        ([Ended((RAISED_TOO,)), Ended((LOST_PEER,), **STAYS)], True, {"b": 1}),
        ([Ended((RAISED_TOO,)), Ended((LOST_PEER,), has_commit=True)], True, {"b": 0}),
        ([Ended((RAISED_TOO,), **STAYS), Ended((LOST_PEER,), has_commit=True)], True, {"a": 1}),
    ],
)
def test_elastic_job_needs_a_host_with_its_state(ended: list[Ended], goes_on: bool, staying: dict[str, int]) -> None:
    outcome = _job(*map(_remote, PLAN.nodes, ended))._judge(ended, None)
    job = ElasticJob(PLAN, [], lambda hosts: PLAN, RestartOptions(max_restarts=1, max_np=2), True, must_stay=True)
    generations = Generations(job, list, Display(OutputPlan(2, prefixed=False)), None)
    assert generations._judge(Mock(), outcome) == goes_on
    assert outcome.staying == staying


@pytest.mark.parametrize(
    ("code", "goes_on"), [(StoppedError.exit_code, True), (CheckpointError.exit_code, True), (1, False)]
)
def test_workers_without_a_new_checkpoint_are_resized(code: int, goes_on: bool) -> None:
    """Their snapshots remain in memory."""
    job = ElasticJob(PLAN, [], lambda hosts: PLAN, RestartOptions(max_np=2), can_resize=True)
    generations = Generations(job, list, Display(OutputPlan(2, prefixed=False)), None)
    generations._resizing = True
    assert generations._judge(Mock(), JobOutcome(code, Failure(0, "a", code))) == goes_on


def test_report_has_the_workers_last_output_at_its_end() -> None:
    report = replace(RAISED, log=Path("logs/worker-2.log")).describe(4)
    assert report.splitlines()[1:] == ["its log: logs/worker-2.log", "Traceback ...", "ValueError: no"]


def test_signals_have_the_shells_exit_codes() -> None:
    assert (KILLED.exit_code, RAISED.exit_code) == (137, 1)


NODE = NodePlan("b", 2, start_command(Transport("ssh", "/opt/py/bin/python"), "b", is_here=False), is_here=False)


@pytest.mark.parametrize(
    ("code", "said", "told"),
    [
        (255, "root@b: Permission denied (publickey).\r\n", "b refuses this user's key; copy it with `ssh-copy-id b`"),
        (255, "Host key verification failed.\r\n", "b has an unknown or changed host key"),
        (255, "ssh: Could not resolve hostname b: Name or service not known", "b is an unknown host name"),
        (255, "ssh: connect to host b port 22: Connection refused", "b has no SSH server at that port"),
        (255, "ssh: connect to host b port 22: No route to host", "b is unreachable"),
        (255, "something new", "b cannot be reached by SSH: something new"),
        (127, "sh: 1: exec: /opt/py/bin/python: not found", "b has no /opt/py/bin/python: install it there"),
        (1, "/opt/py/bin/python: No module named lockstep", "b lacks the package lockstep in /opt/py/bin/python"),
        (
            1,
            "Error while finding module specification for 'lockstep.launch.node' "
            "(ModuleNotFoundError: No module named 'lockstep')",
            "b lacks the package lockstep in /opt/py/bin/python",
        ),
        (2, "Unknown option: -P\nusage: python [option] ...", "b has a /opt/py/bin/python older than 3.11"),
        (9, "", "b failed to start: exit code 9"),
        (-9, "", "the node process on b was killed by SIGKILL (possibly out of memory) during the"),
        (128 + 15, "", "the node process on b was killed by SIGTERM during the start"),
        (255, "", "the SSH connection to b closed without an error: the node process there was killed"),
    ],
)
def test_start_error_is_reported_with_its_fix(code: int, said: str, told: str) -> None:
    line = why_not_started(NODE, code, said)
    assert line.startswith(told)
    assert "\n" not in line


def test_late_node_is_reported_with_likely_causes_and_load() -> None:
    here = NodePlan("here", 1, ("python",))
    assert too_late([NODE, NODE], "answer", 120.0) == (
        "b, b did not answer within 120 s: the machine is overloaded, or the network or the file system is slow; "
        "to wait longer, use --start-timeout S"
    )
    assert re.fullmatch(
        r"here did not import torch within 600 s: the machine is overloaded \(load [\d.]+ on \d+ cores\), or the file "
        r"system is slow; to wait longer, use --start-timeout S",
        too_late([here], "import torch", 600.0),
    )


def test_other_versions_are_named_with_both_hosts() -> None:
    own = {"Lockstep": "1", "torch": "2.15", "Python": "3.11"}
    assert disagreement(["a", "b"], [own, own]) == ""
    line = disagreement(["a", "b", "c"], [own, own, {**own, "torch": "2.14"}])
    assert line.startswith("c has torch 2.14, but a has 2.15: install the same")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One of two workers that failed, the other earlier in time."""
    (tmp_path / "error.1").write_bytes(pickle.dumps((200, 0, "the later error")))
    (tmp_path / "error.2").write_bytes(pickle.dumps((100, 1, "the earlier error")))
    return tmp_path


def test_a_job_fails_by_its_first_error(folder: Path) -> None:
    with pytest.raises(RuntimeError) as raised:
        results(folder, WORKER_FAILED, "worker 1 failed")
    assert str(raised.value) == f"{PROCESS_FAILED} worker 1 failed:\nthe earlier error"


def test_elastic_job_reports_why_it_ended_and_its_last_error(folder: Path) -> None:
    with pytest.raises(RuntimeError) as raised:
        results(folder, WORKER_FAILED, "the reset limit of 1 is reached\n", elastic=True)
    assert str(raised.value) == (
        f"{PROCESS_FAILED} the reset limit of 1 is reached\nThe last error of a worker, 0:\nthe later error"
    )
