"""Jobs whose nodes are started manually, each in its own terminal."""

from __future__ import annotations

import socket
from pathlib import Path

from commands import LOCKSTEP, run_together
from ports import free_port

from lockstep.world.devices import usable_cores


def _run(node: int, port: int, workers: int, script: str) -> list[str]:
    manual = ["--nodes", "2", "--node-rank", str(node), "--master-addr", "127.0.0.1", "--master-port", str(port)]
    return [*LOCKSTEP, "run", *manual, "-np", str(workers), "--log-dir", f"logs{node}", "--", "sh", "-c", script]


def test_ranks_follow_the_nodes_and_slots_may_differ(tmp_path: Path) -> None:
    port, script = free_port(), "echo $RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $GROUP_RANK"
    second, first = run_together([_run(1, port, 1, script), _run(0, port, 2, script)], tmp_path)
    assert sorted(first.stdout.splitlines()[1:]) == ["0/3 0/2 0", "1/3 1/2 0"], first.stderr
    assert second.stdout.splitlines()[1:] == ["2/3 0/1 1"], second.stderr


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


def test_a_node_with_more_workers_than_cores_is_named_there(tmp_path: Path) -> None:
    port, cores = free_port(), usable_cores()
    first, second = run_together([_run(0, port, cores + 1, "true"), _run(1, port, cores, "true")], tmp_path)
    shared = f"{cores} core{'s' if cores > 1 else ''}"
    warning = f"lockstep: localhost: warning: {cores + 1} workers share {shared} and will slow each other down\n"
    assert (first.returncode, first.stderr) == (0, warning)
    assert (second.returncode, second.stderr) == (0, "")
