"""`lockstep stacks` for jobs that it can or cannot show."""

from __future__ import annotations

import json

import pytest

from lockstep.cli import main, stacks
from lockstep.diagnosis.inspection import Frame, WorkerState


@pytest.fixture(autouse=True)
def jobs(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[tuple[str, WorkerState]]]:
    """The workers of each launcher; launchers without workers do not respond."""
    found: dict[int, list[tuple[str, WorkerState]]] = {}

    def ask(pid: int) -> tuple[str, list[tuple[str, WorkerState]]]:
        if not found[pid]:
            raise TimeoutError("timed out")
        return f"job {pid}", found[pid]

    for name, function in (("launchers", lambda: list(found)), ("ask", ask)):
        monkeypatch.setattr(stacks, name, function)
    return found


def test_hosts_of_workers_are_named(
    jobs: dict[int, list[tuple[str, WorkerState]]], capsys: pytest.CaptureFixture[str]
) -> None:
    jobs |= {5: [], 6: [("node7", WorkerState(0, pid=12)), ("node8", WorkerState(1, pid=11))]}
    assert main(["stacks", "6"]) == 0
    title, *groups = capsys.readouterr().out.split("\n\n")
    assert title == "job 6 · process 6"
    assert [group.split(" · ")[0] for group in groups] == ["rank 0 on node7", "rank 1 on node8"]


def test_launcher_that_does_not_respond_does_not_hide_others(
    jobs: dict[int, list[tuple[str, WorkerState]]], capsys: pytest.CaptureFixture[str]
) -> None:
    jobs |= {5: [], 6: [("", WorkerState(0, pid=12))]}
    assert main(["stacks"]) == 0
    assert capsys.readouterr().out.startswith("launcher 5 does not respond: timed out\n\njob 6 · process 6\n")
    assert main(["stacks", "6", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["groups"][0]["hosts"] == []
    assert main(["stacks", "5"]) != 0
    assert capsys.readouterr().err == "lockstep stacks: error: launcher 5 does not respond: timed out\n"


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ([], "no job runs on this host; run this on the host where you started the job"),
        (["7"], "7: not one of your launchers; no job runs on this host"),
        (["runs/a-run"], "runs/a-run: must be a whole number"),
    ],
)
def test_missing_job_is_one_line(words: list[str], hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stacks", *words]) == 2
    assert capsys.readouterr().err == f"lockstep stacks: error: {hint}\n"


def test_json_has_an_object_for_each_job(
    jobs: dict[int, list[tuple[str, WorkerState]]], capsys: pytest.CaptureFixture[str]
) -> None:
    stack = (Frame("train.py", 7, "main"),)
    jobs |= {5: [], 6: [(f"node{rank}", WorkerState(rank, pid=12, stack=stack)) for rank in range(2)]}
    assert main(["stacks", "--json"]) == 0
    silent, job = map(json.loads, capsys.readouterr().out.splitlines())
    assert silent == {"process": 5, "error": "timed out"}
    assert (job["process"], job["command"]) == (6, "job 6")
    (group,) = job["groups"]
    assert (group["ranks"], group["hosts"], group["stack"][0]["line"]) == ([0, 1], ["node0", "node1"], 7)
