"""Jobs whose nodes are started manually, each in its own terminal."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from commands import LOCKSTEP, Job, own_environment, run, run_together, started
from ports import free_port
from time_limits import wait_for_ends

from lockstep.files.jsonl import read_records

HANGING = Path(__file__).parents[1] / "support/hanging.py"
WAIT = "echo here $RANK; sleep 1000"


def _run(node: int, port: int, workers: int, script: str, *options: str, nodes: int = 2) -> list[str]:
    return _command(node, port, workers, *options, "--log-dir", f"logs{node}", "--", "sh", "-c", script, nodes=nodes)


def _command(node: int, port: int, workers: int, *words: str, nodes: int = 2) -> list[str]:
    manual = ["--nodes", str(nodes), "--node-rank", str(node)]
    manual += ["--master-addr", "127.0.0.1", "--master-port", str(port)]
    return [*LOCKSTEP, "run", *manual, "-np", str(workers), *words]


@contextmanager
def _nodes(
    tmp_path: Path, *commands: list[str], environments: tuple[Mapping[str, str] | None, ...] = (None, None, None)
) -> Iterator[list[Job]]:
    """Start nodes, in this order; their output is in node-N.txt."""
    with ExitStack() as stack:
        yield [
            stack.enter_context(started(command, tmp_path, env, output=tmp_path / f"node-{number}.txt"))
            for number, (command, env) in enumerate(zip(commands, environments, strict=False))
        ]


def _ended(*jobs: Job) -> list[int]:
    """Wait for the nodes, none of whose processes are left behind; return their exit codes."""
    running = [process for job in jobs for process in job.descendants()]
    codes = [job.wait(100) for job in jobs]
    wait_for_ends(running)
    return codes


def test_ranks_follow_the_nodes_and_slots_may_differ(tmp_path: Path) -> None:
    port, script = free_port(), "echo $RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $GROUP_RANK $MASTER_ADDR"
    second, first = run_together([_run(1, port, 1, script), _run(0, port, 2, script)], tmp_path)
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    own = [line for line in first.stdout.splitlines() if "/" in line]
    assert sorted(own) == ["0/3 0/2 0 127.0.0.1", "1/3 1/2 0 127.0.0.1", "2/3 0/1 1 127.0.0.1"]
    assert second.stderr.splitlines() == [
        f"lockstep: connected to the first node at 127.0.0.1:{port}, which shows all output",
        "lockstep: the job finished with exit code 0",
    ]
    assert (tmp_path / "logs0/worker-2.log").read_text() == "2/3 0/1 1 127.0.0.1\n"


def test_a_node_runs_its_own_command_in_its_own_environment(tmp_path: Path) -> None:
    port, folder = free_port(), tmp_path / "elsewhere"
    folder.mkdir()
    with _nodes(
        tmp_path,
        _run(0, port, 1, "echo first $WHERE"),
        [*_run(1, port, 1, 'echo other $WHERE "$SECRETS"')],
        environments=(own_environment(WHERE="a", SECRETS="a"), own_environment(WHERE="b")),
    ) as jobs:
        assert _ended(*jobs) == [0, 0], jobs[0].text
        assert {"first a", "other b "} <= {*jobs[0].text.splitlines()}


def test_a_failure_on_one_node_ends_the_other_and_is_named_there(tmp_path: Path) -> None:
    port, script = free_port(), "test $RANK = 2 && exit 7; sleep 100"
    for done in run_together([_run(0, port, 2, script), _run(1, port, 1, script)], tmp_path):
        assert done.returncode == 7, done.stderr
        assert "worker 2 of 3 on " in done.stderr
        assert "failed with exit code 7" in done.stderr


def test_a_busy_port_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        (done,) = run_together([_run(0, server.getsockname()[1], 1, "true")], tmp_path)
    assert done.returncode == 3
    assert "Address already in use; change --master-port" in done.stderr


def test_the_classic_flags_train_one_model_on_both(tmp_path: Path) -> None:
    where = ["--dist-url", f"tcp://127.0.0.1:{free_port()}", "--world-size", "2"]
    train = [*LOCKSTEP, "train", "--epochs", "1", "--run-dir", "run", "--device", "cpu", *where]
    first, second = run_together([[*train, "--rank", "0"], [*train, "--rank", "1"]], tmp_path)
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert "worker 1 of 2: " in first.stdout
    assert "over 2 workers" in first.stdout


def test_a_late_node_is_named_with_the_time_of_the_wait(tmp_path: Path) -> None:
    port = free_port()
    early, other = _run(0, port, 1, "true"), _run(1, port, 1, "true")
    with started(early, tmp_path) as job:
        job.wait_for("lockstep: waiting for node 1 of 2 until ")
        assert re.search(r"until \d\d:\d\d:\d\d \(--start-timeout\)\n", job.text)
        done = run(other, tmp_path)
        assert (done.returncode, job.wait(100)) == (0, 0), done.stderr + job.text


def test_first_node_that_never_comes_is_named(tmp_path: Path) -> None:
    port = free_port()
    done = run(_run(1, port, 1, "true", "--start-timeout", "1"), tmp_path)
    assert done.returncode == 3
    assert f"cannot join the first node at 127.0.0.1:{port}: no answer within 1 s" in done.stderr


def test_interrupt_of_a_node_ends_all(tmp_path: Path) -> None:
    port = free_port()
    with _nodes(tmp_path, _run(0, port, 2, WAIT), _run(1, port, 1, WAIT)) as jobs:
        jobs[0].wait_until(lambda: jobs[0].text.count("\nhere ") == 3)
        jobs[1].send_signal(signal.SIGINT)
        assert _ended(*jobs) == [130, 130], jobs[1].text
        assert all("lockstep: stopped by SIGINT; all workers have exited\n" in job.text for job in jobs)


def test_interrupt_before_all_have_joined_ends_those_that_have(tmp_path: Path) -> None:
    port = free_port()
    with _nodes(tmp_path, *(_run(node, port, 1, "true", nodes=3) for node in (0, 1))) as (first, other):
        other.wait_for("connected to the first node")
        first.send_signal(signal.SIGINT)
        assert _ended(first, other) == [130, 130]


def test_interrupted_node_that_waits_leaves_alone(tmp_path: Path) -> None:
    port = free_port()
    with _nodes(tmp_path, *(_run(node, port, 1, "true", nodes=3) for node in (0, 1))) as (first, other):
        other.wait_for("connected to the first node")
        other.send_signal(signal.SIGINT)
        assert other.wait(100) == 130
        assert first.poll() is None
        with _nodes(tmp_path, *(_run(node, port, 1, "true", nodes=3) for node in (1, 2))) as others:
            assert _ended(*others) == [0, 0]
        assert first.wait(100) == 0


# As under nohup, whose programs keep ignoring it.
IGNORES_SIGHUP = pytest.mark.skipif(signal.getsignal(signal.SIGHUP) == signal.SIG_IGN, reason="SIGHUP is ignored here")


def test_node_whose_launcher_dies_is_lost(tmp_path: Path) -> None:
    port = free_port()
    with _nodes(tmp_path, _run(0, port, 1, WAIT), _run(1, port, 1, WAIT)) as (first, other):
        first.wait_for("here 1")
        running = other.descendants()
        other.kill()
        assert other.wait(100) == -signal.SIGKILL
        assert _ended(first) == [1]
        assert re.search(r"lockstep: lost node1\..*: .*; the others were stopped\n", first.text)
        wait_for_ends(running)


def test_death_of_the_first_node_ends_the_others(tmp_path: Path) -> None:
    port = free_port()
    with _nodes(tmp_path, _run(0, port, 1, WAIT), _run(1, port, 1, WAIT)) as (first, other):
        first.wait_for("here 1")
        running = first.descendants()
        first.kill()
        assert _ended(other) == [1]
        wait_for_ends(running)
        assert f"lockstep: lost the first node at 127.0.0.1:{port}; the workers here were ended\n" in other.text


def test_study_measures_on_all_nodes(tmp_path: Path) -> None:
    where = ["--nodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    study = [*LOCKSTEP, "study", "scaling", "-np", "1,2", "--mode", "weak", "--repeats", "1", "--steps", "2", *where]
    commands = [[*study, "--node-rank", str(node), "--", "digits", "--device", "cpu"] for node in (0, 1)]
    secret = own_environment(LOCKSTEP_JOB_SECRET="secret")
    first, other = run_together(commands, tmp_path, secret)
    assert (first.returncode, other.returncode) == (0, 0), first.stdout + first.stderr + other.stderr
    measured = {record["workers"]: record for record in read_records(tmp_path / "study/scaling.jsonl")}
    assert {workers: record["nodes"] for workers, record in measured.items()} == {1: 1, 2: 2}
    assert all(record["step_seconds"]["median"] > 0 for record in measured.values())
    assert "recorded in" not in other.stdout


def test_training_on_all_nodes_goes_on_after_a_loss(tmp_path: Path) -> None:
    port = free_port()
    manual = ["--nodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(port), "--max-restarts", "1"]
    train = [*LOCKSTEP, "train", "digits", "--epochs", "3", "-p", "4", "--device", "cpu", *manual, "--node-rank"]
    with _nodes(tmp_path, [*train, "0"], [*train, "1"]) as jobs:
        jobs[0].wait_for("epoch 1/3  train")
        (worker,) = jobs[1].workers()
        worker.kill()
        assert _ended(*jobs) == [0, 0], jobs[0].text
        assert "lockstep: restart 1 of 1, with 2 workers, of which 1 stays" in jobs[0].text
        assert "was ended by SIGKILL" in jobs[1].text
    (path,) = (tmp_path / "runs").iterdir()  # both have taken the first node's folder
    assert [each["kind"] for each in read_records(path / "metrics.jsonl")].count("generation") == 1


@IGNORES_SIGHUP
def test_lost_node_that_is_started_again_takes_part_again(tmp_path: Path) -> None:
    port = free_port()
    script = "echo here $RANK $TORCHELASTIC_RESTART_COUNT; until [ -e go ]; do sleep 0.1; done"
    with _nodes(
        tmp_path, _run(0, port, 1, script, "--max-restarts", "1"), _run(1, port, 1, script, "--max-restarts", "1")
    ) as (first, other):
        first.wait_for("here 1 0")
        os.kill(other.pid, signal.SIGHUP)
        first.wait_for("lockstep: 1 slots are left, but the job needs 2 (--min-np); waiting for hosts")
        with started(_run(1, port, 1, script), tmp_path, output=tmp_path / "again.txt") as again:
            first.wait_for("here 1 1")
            (tmp_path / "go").touch()
            assert _ended(first, again) == [0, 0], first.text + again.text


def test_stacks_and_steps_of_all_nodes_are_on_the_first(tmp_path: Path) -> None:
    port, words = free_port(), ["--", sys.executable, str(HANGING), "ddp", "sleep", "1"]
    first, other = _command(0, port, 1, "--observe-dir", "steps", *words), _command(1, port, 1, *words)
    with _nodes(tmp_path, first, other) as jobs:
        stacks = [*LOCKSTEP, "stacks", str(jobs[0].pid)]
        text = jobs[0].wait_until(lambda: "misbehave" in (text := run(stacks, tmp_path).stdout) and text)
        assert re.search(r"rank 1 .*in user code, at hanging.py:\d+ in misbehave\n", text)
        jobs[0].send_signal(signal.SIGTERM)
        assert _ended(*jobs) == [143, 143]
    records = list(read_records(tmp_path / "steps/metrics.jsonl"))
    assert records[0]["workers"] == 2
