"""`--json`: one line of JSON on stdout, for programs, and all other output on stderr."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from typing import Any

from lockstep.errors import INTERRUPTED
from lockstep.files.output import say
from lockstep.launch.controller.job_outcome import JobEnd, JobOutcome


def json_only(wanted: bool) -> AbstractContextManager[Any]:
    """Redirect stdout to stderr, except for `print_json`, if JSON is wanted."""
    return redirect_stdout(sys.stderr) if wanted else nullcontext()


def print_json(content: Mapping[str, Any]) -> None:
    say(json.dumps(content), sys.__stdout__)


def with_job_end(run: Callable[[JobEnd], int], wants_json: bool) -> int:
    """Run a job and return its exit code; with JSON, print how it ended, or which error prevented it."""
    end, start = JobEnd(), time.monotonic()
    with json_only(wants_json):
        try:
            end.exit_code = run(end)
        except (Exception, KeyboardInterrupt) as error:
            if isinstance(error, Exception):
                end.add(JobOutcome(getattr(error, "exit_code", 1), trouble=error))
            else:
                end.add(JobOutcome(INTERRUPTED, request=signal.SIGINT))
            raise
        finally:
            if wants_json and end.exit_code is not None:  # None: only help was printed
                print_json({**vars(end), "seconds": round(time.monotonic() - start, 3)})
    return end.exit_code
