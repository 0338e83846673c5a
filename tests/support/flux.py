"""A stand-in for Flux, with the commands and variables of flux-environment(7), flux-run(1) and flux-hostlist(1).

It starts all tasks on this machine, whatever their host's name. It refuses commands and options that it does not know.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

HOSTS = "FAKE_FLUX_HOSTS"  # as a compact list
JOB = "ƒ2PqVbFs"


def install(folder: Path, hosts: str) -> dict[str, str]:
    """Write a `flux` into a folder; return the environment in which a batch script of an instance on `hosts` runs."""
    folder.mkdir(exist_ok=True)
    program = folder / "flux"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{__file__}" "$@"\n')
    program.chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}", "FLUX_URI": f"local://{folder}/local", HOSTS: hosts}


def use(folder: Path, hosts: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Install it, and set its variables for this process; return them."""
    variables = install(folder, hosts)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return variables


def main() -> int:
    """Do what the command line says, and return the exit code."""
    match sys.argv[1:]:
        case ["run", *words]:
            return _run(words)
        case ["job", "info", job, "R"] if job == JOB:
            print(json.dumps({"version": 1, "execution": {"nodelist": [os.environ[HOSTS]]}}))
        case ["job", "timeleft"]:
            print(os.environ.get("FAKE_FLUX_SECONDS", "inf"))
        case ["getattr", "jobid"] if os.environ[HOSTS]:
            print(JOB)
        case ["getattr", "hostlist"]:
            print(os.environ[HOSTS])
        case _:
            print(f"flux: ERROR: {sys.argv[1:]}: No such attribute", file=sys.stderr)
            return 1
    return 0


def _run(words: list[str]) -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--tasks-per-node", type=int, default=1)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    job = parser.parse_args(words)
    size = job.nodes * job.tasks_per_node
    tasks = []
    for rank in range(size):
        local = {"FLUX_TASK_RANK": rank, "FLUX_TASK_LOCAL_ID": rank % job.tasks_per_node, "PMI_RANK": rank}
        variables = {**local, "FLUX_JOB_SIZE": size, "FLUX_JOB_NNODES": job.nodes, "PMI_SIZE": size, "PMI_FD": 9}
        numbers = {name: str(value) for name, value in variables.items()}
        tasks.append(subprocess.Popen(job.command, env={**os.environ, "FLUX_JOB_ID": JOB, **numbers}))
    return max(task.wait() for task in tasks)


if __name__ == "__main__":
    sys.exit(main())
