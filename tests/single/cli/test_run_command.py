"""What `lockstep run` does with the terminal and the logs."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest

from lockstep.cli import main
from lockstep.cli.run import LOGS, new_logs
from lockstep.launch.controller.job_series import JobSeries
from lockstep.launch.controller.start_errors import StartError
from lockstep.launch.output import OutputPlan
from lockstep.launch.plan.job_plan import JobPlan


@pytest.fixture
def set_job(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., int]], None]:
    """Return a function that sets what is called instead of running a job."""
    return partial(monkeypatch.setattr, JobSeries, "run")


def test_a_job_goes_on_without_default_logs(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logs = new_logs()
    assert logs
    assert logs.is_dir()
    assert logs.parent == LOGS
    logs.rmdir()
    LOGS.rmdir()
    LOGS.write_text("a file, so that no folder can be created")
    assert new_logs() is None
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("lockstep: warning: no logs: lockstep-logs/")
    assert line.endswith(": Not a directory; choose a folder with --log-dir DIR")


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("flags", "has_terminal"),
    [
        ("", True),
        ("-np 2", False),
        ("--prefix", False),
        ("--log-dir logs", False),
        ("-H localhost:1", True),
        ("--json", False),
    ],
)
def test_one_worker_has_the_terminal_unless_output_is_wanted(
    flags: str, has_terminal: bool, set_job: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[tuple[bool, bool]] = []

    def run(jobs: JobSeries, plan: JobPlan, output: OutputPlan, **_: object) -> int:
        found.append((plan.terminal, output.logs is None))
        return 0

    for name, stand_in in (("has_terminal", lambda: True), ("restored_terminal", nullcontext)):
        monkeypatch.setattr(f"lockstep.cli.run.{name}", stand_in)
    set_job(run)
    assert main(["run", "--no-observe", *flags.split(), "--", "true"]) == 0
    assert found == [(has_terminal, has_terminal)]


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("words", "error", "code", "cause"),
    [
        (["true"], None, 0, None),
        (["true"], KeyboardInterrupt(), 130, {"kind": "stop", "signal": "SIGINT", "text": ""}),
        (["true"], StartError("no host"), 3, {"kind": "error", "signal": "", "text": "no host"}),
        (["-np", "0", "true"], None, 2, {"kind": "error", "signal": "", "text": "-np 0: must be at least 1"}),
        (["--nq", "2", "true"], None, 2, {"kind": "error", "signal": ""}),
        ([], None, 2, {"kind": "error", "signal": ""}),
        (["absent.sh"], None, 2, {"kind": "error", "signal": ""}),
    ],
)
def test_json_has_one_line_for_any_end(
    words: list[str],
    error: BaseException | None,
    code: int,
    cause: dict[str, str] | None,
    set_job: Callable[..., None],
    capfd: pytest.CaptureFixture[str],
) -> None:
    def run(*_: object, **__: object) -> int:
        print("output of a worker", flush=True)
        if error:
            raise error
        return 0

    set_job(run)
    assert main(["run", "--json", *words]) == code
    printed = capfd.readouterr()
    end = json.loads(printed.out)
    assert (end["exit_code"], end["hangs"], end["seconds"] >= 0) == (code, None, True)
    assert cause == (end["cause"] and {name: end["cause"][name] for name in cause or ()})
    assert ("output of a worker" in printed.err) == (words == ["true"])
    if code == 2:
        assert printed.err == f"lockstep run: error: {end['message']}\n"


def test_help_is_printed_without_json(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["run", "--json", "--help"])
    assert capfd.readouterr().out == ""
