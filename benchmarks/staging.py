"""How long does `--stage` take to bring files to all hosts, and how much faster do workers start from them?

    python benchmarks/staging.py [links] [start] [--rounds 3] [--megabits 50] [--megabytes 64] [--delay MILLISECONDS]

- links: eight hosts (network namespaces; needs root, iproute2 and sshd) get a file from a ninth. All have links of 50
  Mbit/s each way. The peer copies the file from there to each host by ssh, all at the same time. The
  figure is the wall time; that of `lockstep run --stage` includes the start and end of a job of nine workers that do
  nothing. Bar: at most 0.25.
- start: each open and stat under Python's folders takes 1 ms longer, as on a busy shared file system. The figure is the
  time to the first step of a script of torch alone, with two workers. `--stage environment` copies the environment
  first, so the figure is what the copy costs a job on one host. Needs a C compiler, and the environment's size on the
  disk.
"""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from harness import FOLDER, Bar, rounds
from one_import import STEP, counted
from readings import Reading, compare_readings

sys.path.insert(0, str(FOLDER.parent / "tests" / "support"))
hosts = importlib.import_module("hosts")

PARTS = ("links", "start")
HOSTS = 8
DISK = "/dev/shm"  # each host has its own


def links(megabits: float, megabytes: int, count: int) -> None:
    with hosts.Bed(HOSTS) as bed, TemporaryDirectory() as name:
        file = Path(name) / "data"
        file.write_bytes(bytes(megabytes * 10**6))
        for host in (hosts.HEAD, *bed.names):
            bed.limit(host, f"{megabits}mbit")
        where = ",".join(f"{host}:1" for host in (hosts.HEAD, *bed.names))
        run = [sys.executable, "-m", "lockstep", "run", "-H", where, f"--ssh-option={bed.ssh_options}", "--no-observe"]
        run += ["--stage", str(file), "--stage-dir", DISK, "--log-dir", f"{name}/logs", "--", "test", "-f", str(file)]

        def by_ssh() -> dict[str, float]:
            began = time.monotonic()
            copies = [
                bed.start(hosts.HEAD, ["sh", "-c", f"ssh {bed.ssh_options} {host} 'cat >{DISK}/copy' <{file}"])
                for host in bed.names
            ]
            assert not any(copy.wait() for copy in copies)
            return {"all hosts have the file": time.monotonic() - began}

        def staged() -> dict[str, float]:
            began = time.monotonic()
            job = bed.start(hosts.HEAD, run, cwd=name, stdout=subprocess.DEVNULL)
            assert job.wait() == 0
            return {"all hosts have the file": time.monotonic() - began}

        contestants: dict[str, Reading] = {"ssh from one host to each": by_ssh, "lockstep run --stage": staged}
        bars = {("all hosts have the file", "lockstep run --stage"): Bar("at most", 0.25)}
        case = f"staging: {megabytes} MB to {HOSTS} hosts at {megabits:g} Mbit/s"
        compare_readings(case, contestants, bars, "seconds", count, warm_up=0)


def start(delay_seconds: float, count: int) -> None:
    with TemporaryDirectory() as name:
        run = [sys.executable, "-m", "lockstep", "run", "-np", "2"]
        stage = ["--stage", "environment", "--stage-dir", name]

        def reading(*flags: str) -> Reading:
            return lambda: {"to the first step": counted([*run, *flags, "--", sys.executable, STEP], delay_seconds)[1]}

        contestants = {"lockstep run": reading(), "lockstep run --stage": reading(*stage)}
        case = f"staging: files that take {1000 * delay_seconds:g} ms each"
        compare_readings(case, contestants, {}, "seconds", count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], metavar="PART", help=f"{', '.join(PARTS)}; or both")
    parser.add_argument("--rounds", type=rounds, default=3)
    parser.add_argument("--megabits", type=float, default=50)
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--delay", type=float, default=1.0, metavar="MILLISECONDS", help="delay of each open and stat")
    given = parser.parse_args()
    parts = given.parts or PARTS
    if "links" in parts:
        if reason := hosts.missing():
            parser.error(f"links: {reason}")
        links(given.megabits, given.megabytes, given.rounds)
    if "start" in parts:
        start(given.delay / 1000, given.rounds)


if __name__ == "__main__":
    main()
