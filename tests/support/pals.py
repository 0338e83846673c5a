"""A stand-in for PALS' `mpiexec`, with the options that ALCF documents for Polaris and Aurora, and PALS' variables.

It starts all processes on this machine. It refuses options that it does not know, and a list of CPUs that does not have
one entry per process of a node.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path


def install(folder: Path) -> dict[str, str]:
    """Write an `mpiexec` into a folder; return the environment of a PBS job that finds it."""
    folder.mkdir()
    program = folder / "mpiexec"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{__file__}" "$@"\n')
    program.chmod(0o755)
    (folder / "nodes").write_text("x3005c0s7b0n0\n")
    return {"PATH": f"{folder}:{os.environ['PATH']}", "PBS_JOBID": "7.pbs", "PBS_NODEFILE": str(folder / "nodes")}


def main() -> int:
    """Start the processes, and return their largest exit code."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("-n", type=int, required=True)
    parser.add_argument("--ppn", type=int, required=True)
    parser.add_argument("--cpu-bind", default="")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    job = parser.parse_args()
    kind, *cpus = job.cpu_bind.split(":")
    if job.cpu_bind and (kind != "list" or len(cpus) != job.ppn):
        parser.error(f"--cpu-bind {job.cpu_bind}: one entry per process of a node")
    processes = []
    for rank in range(job.n):
        node, local_rank = divmod(rank, job.ppn)
        pals = {"PALS_RANKID": rank, "PALS_NODEID": node, "PALS_LOCAL_RANKID": local_rank, "PALS_LOCAL_SIZE": job.ppn}
        pmi = {"PMI_RANK": rank, "PMI_SIZE": job.n, "PMI_LOCAL_RANK": local_rank, "PMI_LOCAL_SIZE": job.ppn}
        variables = {name: str(value) for name, value in {**pals, **pmi}.items()}
        processes.append(subprocess.Popen(job.command, env={**os.environ, "PALS_APID": "8d6c", **variables}))
    return max(process.wait() for process in processes)


if __name__ == "__main__":
    sys.exit(main())
