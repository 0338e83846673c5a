"""Run the checks of a module and report the outcome of each.

A check is a function `check_WHAT()` that raises AssertionError if it fails, or `Skip` if this machine cannot run it. In
a job with several workers, each calls the same checks in the same order; a failure ends its worker, and so the job.
"""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Mapping
from typing import Any

from lockstep.world.launcher_environment import RankInfo

RESULTS = "LOCKSTEP_GPU_SUITE_RESULTS"  # names the file that results are appended to


class Skip(Exception):
    """This machine cannot run the check; the message says why."""


def run_checks(names: Mapping[str, Any]) -> int:
    """Run all checks in a module's namespace, in the order of their definition; return the exit code.

    Rank 0 reports every check, and any other rank those that fail on it.
    """
    rank_info = RankInfo.from_environment()
    failed = 0
    for name, check in names.items():
        if not name.startswith("check_") or not callable(check):
            continue
        start = time.monotonic()
        status, why = _outcome(check)
        failed += status == "failed"
        if rank_info.rank == 0 or status == "failed":
            tell(name.removeprefix("check_"), status, why, time.monotonic() - start)
        if status == "failed" and rank_info.size > 1:
            os._exit(1)  # the other workers may be waiting for this one in a collective
    return 1 if failed else 0


def _outcome(check: Any) -> tuple[str, str]:
    try:
        check()
    except Skip as reason:
        return "skipped", str(reason)
    except Exception as error:
        traceback.print_exc()
        return "failed", f"{type(error).__name__}: {error}".splitlines()[0]
    return "passed", ""


def tell(name: str, status: str, why: str, seconds: float) -> None:
    """Print the outcome of a check, and append it to the results."""
    name = f"{os.environ.get('LOCKSTEP_GPU_SUITE_JOB', '')}{name}"
    print(f"  {status:8}{name} ({seconds:.1f} s){': ' if why else ''}{why}", flush=True)
    if path := os.environ.get(RESULTS):
        with open(path, "a") as file:
            file.write(json.dumps({"check": name, "status": status, "why": why, "seconds": round(seconds, 2)}) + "\n")
