"""Part `check`: run all correctness checks, in separate jobs; the exit code is 1 if one failed.

`shared` and `trainer` run in two workers that share the GPU through Gloo, `shared-nccl` in two that share it through
NCCL with NCCL_MULTI_RANK_GPU_ENABLE=1. A version of NCCL without this variable rejects the job, which is reported as
"refused", not as a failure.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from gpu.checking import RESULTS
from gpu.device import ON_CUDA, ON_GPU
from gpu.recording import record
from gpu.suite import run_until

# NCCL's messages when it rejects two workers on one GPU.
REFUSALS = ("Duplicate GPU detected", "invalid usage", "ncclInvalidUsage")


@dataclass(frozen=True)
class Job:
    """One or two processes that run modules of checks; if `optional`, NCCL may reject the job or hang."""

    name: str
    modules: tuple[str, ...]
    workers: int = 1
    most_seconds: float = 150.0
    environment: dict[str, str] = field(default_factory=dict)
    optional: bool = False

    def command(self) -> list[str]:
        checks = [sys.executable, "-m", "gpu.checks", *self.modules]
        launcher = [sys.executable, "-m", "lockstep", "run", "-np", str(self.workers), "--no-prefix", "--"]
        return checks if self.workers == 1 else [*launcher, *checks]


def jobs() -> list[Job]:
    if not ON_GPU:  # CPU jobs run one after another: fewer jobs import torch less often
        return [
            Job("alone", ("alone", "own")),
            Job("workers", ("shared", "trainer"), 2),
            Job("commands", ("commands",)),
        ]
    nccl = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_DEBUG": "WARN"}
    return [
        Job("alone", ("alone",), most_seconds=180),
        Job("own", ("own",), most_seconds=90),
        Job("shared", ("shared",), 2, environment={"NCCL_MULTI_RANK_GPU_ENABLE": ""}),
        Job("trainer", ("trainer",), 2, environment={"NCCL_MULTI_RANK_GPU_ENABLE": ""}),
        Job("commands", ("commands",), most_seconds=270),
        *([Job("shared-nccl", ("shared",), 2, 75, nccl, optional=True)] if ON_CUDA else []),  # last, as it may hang
    ]


def run(job: Job, seconds: float) -> list[dict[str, object]]:
    """Run a job; return a row per check, and one for the job itself if it failed outside of a check."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        results, output = Path(folder, "results.jsonl"), Path(folder, "output.txt")
        results.touch()
        os.environ.update(job.environment, LOCKSTEP_GPU_SUITE_JOB=f"{job.name}: ", **{RESULTS: str(results)})
        with output.open("wb") as log:
            code, overtime = run_until(job.command(), seconds, log.fileno())
        for name in job.environment:
            del os.environ[name]
        rows: list[dict[str, object]] = [json.loads(line) for line in results.read_text().splitlines()]
        said = output.read_text(errors="replace")
    failed = [row for row in rows if row["status"] == "failed"]
    if code != 0 and not failed:
        if overtime and seconds < job.most_seconds:
            status, why = "left out", f"not all of it fitted into the {seconds:.0f} s that were left"
        else:
            status, why = "failed", "its time was over" if overtime else f"it ended with exit code {code}"
        rows.append({"check": f"{job.name}: the job", "status": status, "why": why})
        failed = [row for row in rows if row["status"] == "failed"]
    if failed and job.optional:
        reason = next((words for words in REFUSALS if words in said), "")
        if reason or overtime:
            known = f"this NCCL does not know it: {reason}" if reason else "NCCL hangs with it"
            rows = [row for row in rows if row["status"] != "failed"]
            rows.append({"check": f"{job.name}: two workers on one GPU", "status": "refused", "why": known})
    print(f"{job.name}: {time.monotonic() - start:.0f} s", flush=True)
    for row in rows:
        print(f"  {row['status']:10}{row['check']}{': ' if row['why'] else ''}{row['why']}", flush=True)
    if any(row["status"] in ("failed", "refused", "left out") for row in rows):
        print("  it printed, at the end:\n    " + "\n    ".join(said.splitlines()[-60:]), flush=True)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="+", default=[])
    parser.add_argument("--seconds", type=float, default=600)
    options = parser.parse_args()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # required for deterministic cuBLAS
    os.environ.setdefault("OMP_NUM_THREADS", "2" if ON_GPU else "1")
    end = time.monotonic() + options.seconds
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # run the `finally` blocks that end the current job
    rows: list[dict[str, object]] = []
    for job in jobs():
        rest = end - time.monotonic()
        left = min(job.most_seconds, rest) if ON_CUDA else rest
        if options.only and job.name not in options.only:
            continue
        if left < 15:
            rows.append({"check": job.name, "status": "left out", "why": "for lack of time"})
            print(f"{job.name}: left out, for lack of time", flush=True)
            continue
        rows += run(job, left)
    counts = Counter(str(row["status"]) for row in rows)
    print(f"checks: {', '.join(f'{count} {status}' for status, count in counts.items())}", flush=True)
    record("check", counts=dict(counts), checks=rows)
    return 1 if counts.get("failed") else 0


if __name__ == "__main__":
    sys.exit(main())
