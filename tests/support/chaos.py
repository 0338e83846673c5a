"""Kill a random part of a job on two hosts.

Each round starts three workers by ssh, kills one part of the job, and checks that everything ended in time on both
hosts and the head, that the launcher (if it was not killed) named the cause once and exited with an error, and that no
process and no file in TMPDIR or /dev/shm is left.

The parts: a worker, a loader process, a host's node process (node) or guard process (guard), the launcher, a host's ssh
session at either end (sshd, ssh), and a host's network link (link). The jobs: worker_script.py with children that
ignore signals, `lockstep train digits`, and `lockstep train` of a folder of images with loader processes. In some
rounds the part is killed while the job is starting.
"""

from __future__ import annotations

import dataclasses
import random
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
from hosts import HEAD, Bed
from PIL import Image
from ssh_job import Job, kill, name_of

WORKERS = 3
PARTS = ("worker", "loader", "node", "guard", "launcher", "sshd", "ssh", "link")
PARTS_AT_START = ("guard", "launcher", "sshd", "ssh", "link")
# Seconds until everything has exited: 10 if the launcher sees the failure, 15 if it or the connection to it is gone.
LIMITS = {"launcher": 15.0, "sshd": 15.0, "ssh": 15.0, "link": 15.0}
START_TIMEOUT = 40  # seconds, on a busy machine
START_TIMEOUT_STRUCK = 15  # if the part is killed during the start
RESUME = ("lockstep: the newest checkpoint is", "lockstep: no checkpoint was written")  # last line
AT_START = 0.15  # fraction of the kills during the start
JOBS = {"raw": 6, "digits": 2, "images": 2}  # name: weight


@dataclasses.dataclass
class Round:
    """A round: what was killed, and the result."""

    number: int
    job: str
    part: str
    at_start: bool
    victim: str = ""
    host: str = ""
    seconds: float = 0.0
    code: int | None = None
    verdict: str = ""
    breaches: list[str] = dataclasses.field(default_factory=list)
    patience: float = 1.0  # factor of the time limits, for a busy machine

    @property
    def limit(self) -> float:
        limit = LIMITS.get(self.part, 10.0)
        return self.patience * (max(limit, START_TIMEOUT_STRUCK + 5.0) if self.at_start else limit)

    def row(self) -> str:
        when = "start" if self.at_start else "run"
        outcome = "; ".join(self.breaches) or "ok"
        return (
            f"{self.number:3d} {self.job:6s} {when:5s} {self.part:8s} {self.victim:18s} {self.seconds:5.1f} s "
            f"of {self.limit:2.0f} {self.code!s:>5s} {outcome}  {self.verdict}"
        )


def draw(number: int, chance: random.Random) -> Round:
    """Draw the next round's job and the part to kill."""
    job = chance.choices([*JOBS], [*JOBS.values()])[0]
    at_start = chance.random() < AT_START
    part = chance.choice(
        PARTS_AT_START if at_start else [part for part in PARTS if job != "digits" or part != "loader"]
    )
    return Round(number, job, part, at_start)


def play(bed: Bed, folder: Path, this: Round, chance: random.Random) -> None:
    """Start a job, kill the part, and record what happens."""
    options = ["--start-timeout", str(START_TIMEOUT_STRUCK if this.at_start else START_TIMEOUT)]
    try:
        with _start(bed, folder, this.job, options) as job:
            try:
                _reach_the_moment(job, this, chance)
                strike = _aim(job, this, chance)
            except AssertionError as error:
                this.breaches.append(f"the job did not come to the point: {error}")
                return
            strike()
            _judge(job, this)
            if this.breaches:
                print(f"--- round {this.number}: stdout\n{job.stdout[-1500:]}\n--- stderr\n{job.stderr[-3000:]}\n---")
    finally:
        bed.reset()


def _start(bed: Bed, folder: Path, job: str, options: list[str]) -> Job:
    if job == "raw":
        return Job(bed, folder, "*:stubborn", "*:loader", options=options)
    data = ["digits"] if job == "digits" else [str(_images(folder.parent)), "-j", "1", "--in-memory", "never"]
    data += [] if job == "digits" else ["--image-size", "32", "-a", "cifar-small", "-b", "4"]
    train = [sys.executable, "-m", "lockstep", "train", *data, "--epochs", "5000", "--run-dir", str(folder / "run")]
    return Job(bed, folder, command=train, options=options)


def _images(folder: Path) -> Path:
    """Write a folder of small images of two classes."""
    root = folder / "images"
    for split in ("train", "val"):
        for name, level in (("dark", 60), ("light", 190)):
            path = root / split / name
            path.mkdir(parents=True, exist_ok=True)
            for number in range(12):
                Image.fromarray(np.full((16, 16, 3), level + number, dtype=np.uint8)).save(path / f"{number}.png")
    return root


def _reach_the_moment(job: Job, this: Round, chance: random.Random) -> None:
    if this.at_start:
        time.sleep(chance.uniform(0.1, 6))
        return
    if this.job == "raw":
        job.workers(WORKERS)
    else:
        job.wait_until(lambda: re.search(r"epoch +2/", job.stdout))
    time.sleep(chance.uniform(0, 1))


def _aim(job: Job, this: Round, chance: random.Random) -> Callable[[], object]:
    """Choose what to kill; return a function that kills it."""
    this.host = this.host or chance.choice(["node1", "node2"])
    this.victim = this.host
    if this.part == "launcher":
        this.victim = this.host = HEAD
        return lambda: job.signal(signal.SIGKILL)
    if this.part == "link":
        return lambda: job.bed.link_down(this.host)
    if this.part == "sshd":
        job.wait_until(lambda: job.bed.sessions(this.host))
        return lambda: job.bed.kill_sessions(this.host)
    if this.part == "ssh":
        found = job.wait_until(lambda: [p for p in _named(job, HEAD, "ssh") if this.host in p.cmdline()])
        return lambda: kill(found[0].pid)
    if this.part == "guard":
        below_sshd = job.wait_until(lambda: [c for s in job.bed.sessions(this.host) for c in s.children()])
        return lambda: kill(below_sshd[-1].pid)
    rank, worker = chance.choice(sorted(_workers(job).items()))
    this.host = next(name for name in job.bed.names if worker in job.bed.processes(name))
    this.victim = f"{rank} on {this.host}"
    if this.part == "node":
        return lambda: kill(worker.ppid())
    if this.part == "loader":
        loaders = [child for child in worker.children() if "resource_tracker" not in " ".join(child.cmdline())]
        assert loaders, f"worker {rank} has no loader process"
        return lambda: kill(loaders[0].pid)
    return lambda: kill(worker.pid)


def _named(job: Job, host: str, name: str) -> list[psutil.Process]:
    return [process for process in job.bed.processes(host) if name_of(process) == name]


def _workers(job: Job) -> dict[int, psutil.Process]:
    """Return the workers by rank: the processes that have a RANK and whose parents have none."""
    ranks = {process.pid: (_rank(process), process) for name in job.bed.names for process in job.bed.processes(name)}
    with_rank = {pid: (rank, process) for pid, (rank, process) in ranks.items() if rank is not None}
    workers = {rank: process for rank, process in with_rank.values() if process.ppid() not in with_rank}
    assert sorted(workers) == [*range(WORKERS)], f"workers with ranks {sorted(workers)}"
    return workers


def _rank(process: psutil.Process) -> int | None:
    try:
        rank = process.environ().get("RANK")
    except (psutil.Error, OSError):
        return None
    return int(rank) if rank is not None else None


def _judge(job: Job, this: Round) -> None:
    start = time.monotonic()
    try:
        job.wait_for_end(this.limit)
    except AssertionError as error:
        this.breaches.append(str(error))
        this.code = job.launcher.poll()
    else:
        this.code = job.wait(1)
    this.seconds = time.monotonic() - start
    if files := job.files_left():
        this.breaches.append(f"files left: {', '.join(files)}")
    if this.part == "launcher":
        return
    if this.code == 0 or this.code is None or this.code < 0:
        this.breaches.append(f"exit code {this.code}")
    lines = [line for line in job.stderr.splitlines() if line.startswith("lockstep: ")]
    verdicts = [line for line in lines if not line.startswith(RESUME)]
    this.verdict = verdicts[-1] if verdicts else ""
    pattern = {
        "worker": rf"worker {this.victim.split()[0]} of {WORKERS} on {this.host} was ended by SIGKILL",
        "loader": rf"worker {this.victim.split()[0]} of {WORKERS} on {this.host} failed with exit code",
    }.get(this.part, rf"\b{this.host}\b")
    if not re.search(pattern, this.verdict):
        this.breaches.append(f"{pattern!r} is not what was said")
    if len(verdicts) > 1:
        this.breaches.append(f"{len(verdicts)} verdicts: {verdicts}")
