"""Workers that are forked from a preloaded process: what they see, how they fail, and when they start by themselves.

Most jobs here preload a small package named torch: only what torch itself does needs the real one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from commands import HOROVODRUN, LIMIT_SECONDS, LOCKSTEP, Job, own_environment, run, started
from small_torch import TORCH, write_small_torch
from time_limits import wait_for_ends

from lockstep.launch.controller import run_function
from lockstep.world.devices import usable_cores

pytestmark = [pytest.mark.skipif(sys.platform != "linux", reason="workers are forked only on Linux"), pytest.mark.cold]

STORE = "lockstep: the job's store"
# Keeps the job's report of a worker: `report(**what)`.
REPORT = """
import gc, json, os, sys
from pathlib import Path

def report(**what):
    restart, rank = os.environ.get("TORCHELASTIC_RESTART_COUNT", ""), os.environ["RANK"]
    draft = Path(f"draft-{rank}")
    draft.write_text(json.dumps({"frozen": gc.get_freeze_count(), "pid": os.getpid(), **what}))
    draft.rename(f"{restart}-{rank}.json")
"""


def environment(**more: str | Path) -> dict[str, str]:
    """This process's without what decides whether workers are forked, and with these variables."""
    own = own_environment(**{name: str(value) for name, value in more.items()})
    own.pop("LOCKSTEP_PRELOAD", None)
    return own


@pytest.fixture
def small(tmp_path: Path) -> dict[str, str]:
    """The variables of a job whose torch is small; `imports` of the tests' folder has its importers' pids."""
    packages = tmp_path / "packages"
    write_small_torch(packages)
    path = os.pathsep.join([str(packages), *filter(None, [os.environ.get("PYTHONPATH")])])
    return environment(PYTHONPATH=path, IMPORTS=tmp_path / "imports")


def script(folder: Path, text: str) -> list[str]:
    """The command of a Python script."""
    file = folder / "script.py"
    file.write_text(f"{REPORT}\n{text}")
    return [sys.executable, str(file)]


def launch(
    folder: Path, flags: list[str], command: list[str], variables: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    return run([*LOCKSTEP, "run", *flags, "--", *command], folder, variables, cold=True)


def launched(
    folder: Path, flags: list[str], command: list[str], variables: dict[str, str]
) -> AbstractContextManager[Job]:
    return started([*LOCKSTEP, "run", *flags, "--", *command], folder, variables, cold=True)


def reports(folder: Path, restart: int = 0, workers: int = 2) -> list[dict[str, Any]]:
    return [json.loads((folder / f"{restart}-{rank}.json").read_text()) for rank in range(workers)]


def titled(job: Job, title: str) -> list[psutil.Process]:
    """The job's processes whose command line begins with these words."""
    found = []
    for process in job.descendants():
        with suppress(psutil.NoSuchProcess):
            if " ".join(process.cmdline()).startswith(title):
                found.append(process)
    return found


def importers(folder: Path) -> list[str]:
    file = folder / "imports"
    return file.read_text().split() if file.exists() else []


SEEN = """
def split(name):
    return Path(name).read_bytes().decode().split("\\0")[:-1]

seen = {
    "argv": sys.argv, "command": split("/proc/self/cmdline"), "variables": split("/proc/self/environ"),
    "flags": str(sys.flags), "path": sys.path, "stdin": os.readlink("/proc/self/fd/0"),
    "leads": os.getsid(0) == os.getpid(), "has torch": "torch" in sys.modules, "file": __file__,
    "affinity": sorted(os.sched_getaffinity(0)),
}
environ = dict(os.environ)
parent = os.getppid()
above = int(Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[1])
nodes = [split(f"/proc/{pid}/cmdline")[1:] for pid in (parent, above)]
if os.environ["RANK"] == "1":
    os.environ["OMP_NUM_THREADS"] = "1"
import torch
from torch import distributed
from torch.distributed.elastic.multiprocessing.errors import record
seen["threads"] = torch.get_num_threads()
distributed.init_process_group("gloo")
tensor = torch.full((5,), distributed.get_rank() + 1.0)
distributed.all_reduce(tensor)
seen["sum"] = tensor.tolist()
seen["random"] = torch.initial_seed(), torch.rand(2).tolist()
distributed.destroy_process_group()

@record
def fail():
    raise ValueError("for the record")

try:
    fail()
except ValueError:
    seen["recorded"] = json.loads(Path(os.environ["TORCHELASTIC_ERROR_FILE"]).read_text())["message"]["message"]
report(seen=seen, environ=environ, parent=parent, nodes=nodes, folder=os.getcwd())
"""
OF_A_JOB = (
    "MASTER_PORT",
    "HOROVOD_GLOO_RENDEZVOUS_PORT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_ERROR_FILE",
    "LOCKSTEP_PROGRESS",
    "LOCKSTEP_STARTED",
)


def test_forked_worker_sees_what_a_started_one_sees(tmp_path: Path) -> None:
    found = []
    for way in ([], ["--no-preload"]):
        folder = tmp_path / "".join(way or ["preload"])
        folder.mkdir()
        command = [*script(tmp_path, SEEN), "--lr", "0.1 "]
        variables = environment(OMP_NUM_THREADS="2")
        done = launch(folder, ["-np", "2", "--bind", "cores", *way], command, variables)
        assert done.returncode == 0, done.stderr
        assert "starts its own interpreter" not in done.stderr
        found.append(reports(folder))
        assert {worker["folder"] for worker in found[-1]} == {str(folder)}
    forked, alone = found

    assert all(worker["frozen"] for worker in forked)
    assert not any(worker["frozen"] for worker in alone)
    for workers in found:
        assert len({worker["parent"] for worker in workers}) == 1
        node = ["-P", "-m", "lockstep.launch.node"]
        assert all(worker["nodes"] == [node, node] for worker in workers)  # the node process, and its guard
    for rank, (worker, other) in enumerate(zip(forked, alone, strict=True)):
        for each in (worker, other):
            pairs = sorted(pair.partition("=")[::2] for pair in each["seen"].pop("variables"))
            assert dict(pairs) == each["environ"]
            each["names"] = [name for name, _ in pairs]
            assert all(each["environ"].pop(name) for name in OF_A_JOB if name in each["environ"])
            each["environ"].pop("LOCKSTEP_PRELOAD", None)
            assert each["environ"].pop("LOCKSTEP_COMMAND").startswith("python -m lockstep run -np 2 --bind cores ")
            each["names"] = [name for name in each["names"] if name != "LOCKSTEP_PRELOAD"]
            each["random"] = each["seen"].pop("random")
        assert worker["names"] == other["names"]
        assert worker["environ"] == other["environ"]
        assert worker["seen"] == other["seen"]
        assert worker["environ"]["RANK"] == str(rank)
    for rank, worker in enumerate(forked):
        seen = worker["seen"]
        assert seen["command"] == [*script(tmp_path, SEEN), "--lr", "0.1 "]
        assert seen["stdin"] == os.devnull
        assert seen["leads"]
        assert not seen["has torch"]
        assert seen["sum"] == [3.0] * 5
        assert seen["threads"] == (1 if rank == 1 else min(2, usable_cores()))  # torch with MKL has no more than cores
        assert seen["recorded"] == "ValueError: for the record"
    draws = [[worker["random"] for worker in workers] for workers in found]  # of torch, which some versions seed anew
    assert (draws[0][0] == draws[0][1]) == (draws[1][0] == draws[1][1])
    if usable_cores() > 1:
        assert forked[0]["seen"]["affinity"] != forked[1]["seen"]["affinity"]


@pytest.mark.parametrize(
    ("end", "code", "said", "last"),
    [
        ("raise LookupError('no such thing')", 1, "failed with exit code 1", "LookupError: no such thing"),
        ("sys.exit(7)", 7, "failed with exit code 7", ""),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "was ended by SIGKILL (possibly out of memory)", ""),
    ],
)
def test_a_forked_worker_that_fails_ends_the_job(
    tmp_path: Path, small: dict[str, str], end: str, code: int, said: str, last: str
) -> None:
    text = f"""
import signal, subprocess
if os.environ["RANK"] == "0":
    child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    report(child=child.pid)
    signal.pause()
while not Path("0-0.json").exists():
    pass
report()
{end}
"""
    done = launch(tmp_path, ["-np", "2"], script(tmp_path, text), small)
    workers = reports(tmp_path)
    assert done.returncode == code, done.stderr
    assert f"lockstep: worker 1 of 2 {said}; the others were stopped" in done.stderr
    if last:
        lines = done.stderr.rstrip().splitlines()
        assert lines[-1] == last
        assert lines.index("Traceback (most recent call last):") == len(lines) - 4  # the script's frame alone
    assert all(worker["frozen"] for worker in workers)
    assert not any(psutil.pid_exists(pid) for pid in (*(each["pid"] for each in workers), workers[0]["child"]))


AGAIN = """
import signal, time
import psutil
import torch
first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
report(torch=id(torch), most=os.environ["TORCHELASTIC_MAX_RESTARTS"])
if first and os.environ["RANK"] == "0":
    signal.pause()
if first:
    while not Path("0-0.json").exists():
        pass
    for process in psutil.Process(os.getppid()).children() if "kill" in sys.argv else []:
        if " ".join(process.cmdline()).startswith("lockstep: preloaded"):
            process.kill()
            while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                time.sleep(0.01)
            Path("killed").touch()
    sys.exit(3)
"""


@pytest.mark.parametrize("killed", [False, True])
def test_a_restart_forks_from_the_same_process_while_that_lives(
    tmp_path: Path, small: dict[str, str], killed: bool
) -> None:
    command = [*script(tmp_path, AGAIN), *(["kill"] if killed else [])]
    done = launch(tmp_path, ["-np", "2", "--max-restarts", "1"], command, small)
    assert done.returncode == 0, done.stderr
    assert "lockstep: restart 1 of 1, with 2 workers" in done.stderr
    workers = [*reports(tmp_path, 0), *reports(tmp_path, 1)]
    assert all(worker["frozen"] for worker in workers)
    assert {worker["most"] for worker in workers} == {"1"}
    assert (tmp_path / "killed").exists() == killed
    assert len(importers(tmp_path)) == (2 if killed else 1)
    if not killed:
        assert len({worker["torch"] for worker in workers}) == 1


ELASTIC = """
import signal
from lockstep.world import generations
from lockstep.world.launcher_environment import RankInfo
from lockstep.world.rendezvous import open_store
import torch
generations.stay(must_lead=True)
while True:
    own = RankInfo.from_environment()
    store = open_store(own, 60)
    print("life", own.restart, own.rank, gc.get_freeze_count() > 0, id(torch), flush=True)
    if own.restart == 1:
        sys.exit(0)
    if own.rank == 1:
        store.wait(["stays"])
        os.kill(os.getpid(), signal.SIGKILL)
    store.set("stays", "")
    assert generations.is_over(60)
    generations.join_next()
"""


def test_horovodruns_replacement_for_a_dead_worker_is_forked_too(tmp_path: Path) -> None:
    flags = ["-np", "2", "--min-np", "1"]
    done = run([*HOROVODRUN, *flags, *script(tmp_path, ELASTIC)], tmp_path, environment(), cold=True)
    assert done.returncode == 0, done.stderr
    lives = [line.partition("life ")[2].split() for line in done.stdout.splitlines() if "life " in line]
    assert sorted(life[:2] for life in lives) == [["0", "0"], ["0", "1"], ["1", "0"], ["1", "1"]]
    assert {life[2] for life in lives} == {"True"}
    assert len({life[3] for life in lives}) == 1


@pytest.mark.parametrize(
    ("package", "text", "why"),
    [
        (
            "torchvision",
            "import threading; threading.Thread(target=threading.Event().wait, name='helper', daemon=True).start()",
            "an import started the thread helper",
        ),
        ("torch", "raise OSError('torn')", "torch cannot be preloaded (OSError: torn)"),
        (
            "torch",
            "import os; print('torn', flush=True); os._exit(3)",
            "the preloaded process exited with code 3: torn",
        ),
    ],
)
def test_job_explains_why_workers_are_started_without_forking(
    tmp_path: Path, small: dict[str, str], package: str, text: str, why: str
) -> None:
    (tmp_path / "packages" / package / "__init__.py").write_text(f"{TORCH if package == 'torch' else ''}\n{text}")
    done = launch(tmp_path, ["-np", "2"], script(tmp_path, "report(); print('done')"), small)
    assert done.returncode == 0, done.stderr
    assert [worker["frozen"] for worker in reports(tmp_path)] == [0, 0]
    assert done.stdout.splitlines()[1:] == ["done", "done"]  # after the plan
    (line,) = [line for line in done.stderr.splitlines() if "starts its own interpreter" in line]
    assert line == f"lockstep: each worker starts its own interpreter: {why}"


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_what_imports_print_is_shown_once_however_long_it_is(
    tmp_path: Path, small: dict[str, str], stream: str
) -> None:
    loud = tmp_path / "packages" / "torch" / "_dynamo.py"
    loud.write_text(f"import sys\nprint('x' * 200_000 + '\\nthe end', file=sys.{stream})")
    done = launch(tmp_path, ["-np", "2"], script(tmp_path, "import torch\nreport()"), small)
    assert done.returncode == 0, done.stderr
    assert (done.stdout + done.stderr).count("the end") == 1
    assert all(each["frozen"] for each in reports(tmp_path))


def test_scripts_own_modules_come_before_preloaded_ones(tmp_path: Path, small: dict[str, str]) -> None:
    packages, own = (tmp_path / "packages", tmp_path / "own")
    own.mkdir()  # the launcher, too, imports from the folder that it is started in
    for file in (packages / "helper.py", own / "helper.py", own / "queue.py"):
        file.write_text("")
    (packages / "torch" / "__init__.py").write_text(f"{TORCH}\nimport helper, queue\nhelper_file = helper.__file__")
    text = "import helper, queue, torch\nreport(files=[m.__file__ for m in (helper, queue)], torch=torch.helper_file)"
    done = launch(tmp_path, ["-np", "1"], script(own, text), small)
    assert done.returncode == 0, done.stderr
    (worker,) = reports(tmp_path, workers=1)
    assert worker["frozen"]
    assert worker["files"] == [str(own / "helper.py"), str(own / "queue.py")]
    assert worker["torch"] == str(packages / "helper.py")


def test_a_job_without_python_starts_none_but_the_launchers_own(tmp_path: Path, small: dict[str, str]) -> None:
    shell = ["sh", "-c", "echo up > up-$RANK; while [ ! -e go ]; do sleep 0.05; done"]
    with launched(tmp_path, ["-np", "2"], shell, small) as job:
        job.wait_until(lambda: len(list(tmp_path.glob("up-*"))) == 2)
        family = []
        for process in job.descendants():
            with suppress(psutil.NoSuchProcess):
                family.append((process.name(), process.cmdline()))
        (tmp_path / "go").touch()
        assert job.wait(LIMIT_SECONDS) == 0
    others = [words for name, words in family if name not in ("sh", "sleep", "dash", "bash", "busybox")]
    assert [words[-3:] for words in others] == [["-P", "-m", "lockstep.launch.node"]] * 2  # the guard, and the node
    assert importers(tmp_path) == []
    assert "starts its own interpreter" not in job.text  # which nobody has asked of them


def test_the_end_of_the_stores_process_ends_the_job(tmp_path: Path, small: dict[str, str]) -> None:
    (tmp_path / "packages" / "torch" / "distributed.py").write_text("def TCPStore(*_, **__): pass")
    text = """
import signal, socket
report()
socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
signal.pause()
"""
    with launched(tmp_path, ["-np", "2"], script(tmp_path, text), small) as job:
        job.wait_until(lambda: len(list(tmp_path.glob("0-*.json"))) == 2)
        store = job.wait_until(lambda: titled(job, STORE))
        assert len(store) == 1
        store[0].kill()
        assert job.wait(LIMIT_SECONDS) == 1
    assert "the process that served the job's store exited with code -9" in job.text
    assert not any(psutil.pid_exists(worker["pid"]) for worker in reports(tmp_path))


@pytest.mark.parametrize("victim", ["node", "guard"])
def test_killed_node_process_or_guard_leaves_no_process(tmp_path: Path, small: dict[str, str], victim: str) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    text = """
import signal, subprocess
report(child=subprocess.Popen(["sleep", "1000"], start_new_session=True).pid)
signal.pause()
"""
    with launched(tmp_path, ["-np", "2"], script(tmp_path, text), {**small, "TMPDIR": str(scratch)}) as job:
        job.wait_until(lambda: len(list(tmp_path.glob("0-*.json"))) == 2)
        family = job.descendants()
        workers = reports(tmp_path)
        assert {pid for each in workers for pid in (each["pid"], each["child"])} <= {each.pid for each in family}
        assert [path.name for path in scratch.iterdir() if path.name.startswith("lockstep-")]
        node = psutil.Process(workers[0]["pid"]).parent()
        assert node is not None
        killed = node if victim == "node" else node.parent()
        assert killed is not None
        assert killed.cmdline()[-1] == "lockstep.launch.node"
        killed.kill()
        assert job.wait(LIMIT_SECONDS) not in (0, None)
        wait_for_ends(family)
        assert [path.name for path in scratch.iterdir() if path.name.startswith("lockstep-")] == []


SERIES = """
import sys
from dataclasses import replace
from lockstep.launch.output import OutputPlan
from lockstep.launch.controller.job_series import JobSeries
from lockstep.launch.plan.job_plan import plan_local
with JobSeries() as jobs:
    for number, workers in enumerate((1, 2)):
        plan = plan_local(workers, sys.argv[1:], 2, {})
        assert jobs.run(replace(plan, generation=number), OutputPlan(workers)) == 0
assert "torch" not in sys.modules
"""


def test_jobs_of_a_series_share_only_the_preloaded_process(tmp_path: Path) -> None:
    command = script(tmp_path, "import torch\nreport(torch=id(torch), threads=torch.get_num_threads())")
    done = run([sys.executable, "-c", SERIES, *command], tmp_path, environment(), cold=True)
    assert done.returncode == 0, done.stderr
    workers = [*reports(tmp_path, 0, workers=1), *reports(tmp_path, 1)]
    assert all(worker["frozen"] for worker in workers)
    assert [worker["threads"] for worker in workers] == [2, 1, 1]
    assert len({worker["torch"] for worker in workers}) == 1


@pytest.mark.skipif(torch.__version__ < "2.13", reason="asks for a GPU when it imports the compiler")
def test_what_compiling_needs_is_preloaded(tmp_path: Path) -> None:
    text = "import torch\nloaded = 'torch._inductor.compile_fx' in sys.modules\n"
    twice = "torch.compile(lambda x: 2 * x)(torch.ones(2)).tolist()"
    command = script(tmp_path, f"{text}report(loaded=loaded, twice={twice})")
    done = run([*LOCKSTEP, "run", "-np", "1", "--", *command], tmp_path, environment(), cold=True)
    assert done.returncode == 0, done.stderr
    (worker,) = reports(tmp_path, 0, workers=1)
    assert (worker["loaded"], worker["twice"]) == (True, [2.0, 2.0])


def test_a_function_is_called_in_forked_workers() -> None:
    def frozen() -> tuple[bool, int]:
        import gc

        return gc.get_freeze_count() > 0, int(os.environ["HOROVOD_RANK"])

    assert run_function.run(frozen, num_proc=2) == [(True, 0), (True, 1)]


@pytest.mark.long
def test_128_workers_start_reduce_and_end_on_one_machine(tmp_path: Path) -> None:
    if psutil.virtual_memory().available < 20e9:
        pytest.skip("needs 20 GB")
    text = (
        "from lockstep import hvd\nimport torch\nhvd.init()\nassert hvd.allreduce(torch.ones(9), op=hvd.Sum)[0] == 128"
    )
    command = script(tmp_path, f"{text}\nprint('reduced')")
    low: list[int] = []
    with started([*LOCKSTEP, "run", "-np", "128", "--", *command], tmp_path, environment()) as job:
        before = psutil.virtual_memory().available
        while job.poll() is None:
            low.append(psutil.virtual_memory().available)
            time.sleep(0.1)
        assert job.wait() == 0, job.text
        assert job.text.count("reduced") == 128
    assert before - min(low) < 16e9
