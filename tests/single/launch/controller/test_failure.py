"""Which failure was the first, and its report."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.launch.controller.failure import Failure, first

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


def test_report_has_the_workers_last_output_at_its_end() -> None:
    log = Path("logs/worker-2.log")
    report = Failure(2, "b", 1, "Traceback ...\nValueError: no", log=log).describe(4)
    assert report.splitlines() == [
        "lockstep: worker 2 of 4 on b failed with exit code 1; the others were stopped",
        "its log: logs/worker-2.log",
        "Traceback ...",
        "ValueError: no",
    ]
    assert "worker 1 of 4 was ended by SIGKILL (possibly out of memory" in Failure(1, "", -9).describe(4)
    assert GONE.describe(4) == "lockstep: lost c: the host or the way to it is down; the others were stopped"


def test_signals_have_the_shells_exit_codes() -> None:
    assert (KILLED.exit_code, RAISED.exit_code) == (137, 1)
