"""What happens to workers that were to be forked from a process that has died."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from lockstep.launch.forking.preloaded_process import Adopted, Preloaded
from lockstep.launch.node.worker_starter import WorkerStarter
from lockstep.launch.plan.hosts import Host
from lockstep.launch.plan.job_plan import Transport, plan_job, plan_local

pytestmark = [pytest.mark.cold, pytest.mark.skipif(sys.platform != "linux", reason="workers are forked only on Linux")]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Variables with which the preloaded process imports an empty torch."""
    (tmp_path / "torch.py").write_text("class version: pass")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    own = {name: value for name, value in os.environ.items() if name != "LOCKSTEP_PRELOAD"}
    return {**own, "PYTHONPATH": path}


@pytest.fixture
def starter() -> Iterator[WorkerStarter]:
    starter = WorkerStarter()
    yield starter
    starter.close()


@pytest.mark.parametrize("asked_before", [True, False])
def test_workers_start_without_a_dead_preloaded_process(
    starter: WorkerStarter, environment: dict[str, str], asked_before: bool
) -> None:
    starter.prepare([sys.executable, "-c", "pass"], environment)
    if asked_before:
        starter.wait()
        assert starter.obstacle == ""
    (pid,) = starter.pids
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    if not asked_before:
        starter.wait()
    assert starter.fork([environment], os.getcwd(), "none", [(1, 2)]) == []
    assert "the preloaded process " in starter.obstacle
    assert starter.pids == []


def test_ending_the_preloaded_process_ends_waiting_for_it(
    tmp_path: Path, starter: WorkerStarter, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Its child holds the other end of the connection, as the one that forks workers does for a moment.
    (tmp_path / "torch.py").write_text("import os, time\nclass version: pass\nif not os.fork(): time.sleep(1000)")
    starter.prepare([sys.executable, "-c", "pass"], environment)
    starter.wait()
    (pid,) = starter.pids
    os.kill(pid, signal.SIGSTOP)
    (child,) = psutil.Process(pid).children()
    hear, waits = Preloaded._hear, threading.Event()
    monkeypatch.setattr(Preloaded, "_hear", lambda *arguments, **options: (waits.set(), hear(*arguments, **options)))
    forking = threading.Thread(target=starter.fork, args=([environment], os.getcwd(), "none", [(1, 2)]), daemon=True)
    forking.start()
    try:
        assert waits.wait(60)
        starter.close()
        forking.join(60)
        assert not forking.is_alive()
    finally:
        child.kill()


def test_a_job_with_another_start_has_its_own_preloaded_process(
    starter: WorkerStarter, environment: dict[str, str]
) -> None:
    command = [sys.executable, "-c", "pass"]
    on_two_hosts = plan_job(command, [Host("one", 1), Host("two", 1)], Transport("ssh"), 1, {}).environment
    starter.prepare(command, {**environment, **on_two_hosts})
    (first,) = starter.pids
    alone = plan_local(1, command, 7, {}).environment  # after the loss of one host
    starter.prepare([sys.executable, "-c", "print()"], {**environment, **alone})
    assert starter.pids == [first]
    other_variables = {**environment, "TORCH_LOGS": "dynamo"}
    for words in (command, [sys.executable, "-u", "-c", "pass"]):
        starter.prepare(words, other_variables)
        (other,) = starter.pids
        assert other != first
        first = other
    starter.prepare(["sh", "-c", ":"], environment)
    assert starter.pids == []


def test_a_refused_command_is_not_run_by_another_process(
    tmp_path: Path, environment: dict[str, str], starter: WorkerStarter
) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "torch.py").write_text("raise OSError('broken')")
    broken = {**environment, "PYTHONPATH": f"{tmp_path / 'broken'}{os.pathsep}{environment['PYTHONPATH']}"}
    for variables, is_forked in ((broken, False), (environment, True), (broken, False)):
        starter.prepare([sys.executable, "script.py"], variables)
        starter.wait()
        assert bool(starter.pids) == is_forked


def test_torch_for_xpu_is_imported_by_each_worker(
    tmp_path: Path, environment: dict[str, str], starter: WorkerStarter
) -> None:
    (tmp_path / "torch.py").write_text("class version: xpu = '20250301'")
    starter.prepare([sys.executable, "-c", "pass"], environment)
    starter.wait()
    assert "XPU" in starter.obstacle
    assert starter.pids == []


def test_a_reaped_child_counts_as_killed() -> None:
    pid = os.fork()
    if not pid:
        os._exit(5)
    os.waitpid(pid, 0)
    assert Adopted(pid).poll() == -signal.SIGKILL


def test_what_could_not_be_imported_is_not_tried_again(
    tmp_path: Path, environment: dict[str, str], starter: WorkerStarter
) -> None:
    (tmp_path / "torch.py").write_text(f"open({str(tmp_path / 'tried')!r}, 'a').write('x')\nraise OSError('broken')")
    for obstacles in (["broken"], []):
        starter.prepare([sys.executable, "script.py"], environment)
        starter.wait()
        assert [word for word in ("broken",) if word in starter.obstacle] == obstacles
        assert starter.pids == []
    assert (tmp_path / "tried").read_text() == "x"
