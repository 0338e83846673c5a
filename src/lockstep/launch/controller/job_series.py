"""Run jobs without restarts: one, or several in turn."""

from __future__ import annotations

import asyncio
import io
import time
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from typing import Any

from lockstep.files.output import received
from lockstep.launch.controller.job_outcome import JobEnd
from lockstep.launch.controller.job_run import JobRun
from lockstep.launch.controller.remote_node import NodePool
from lockstep.launch.output import Display, OutputPlan
from lockstep.launch.plan.job_plan import JobPlan
from lockstep.observe.job_steps import JobSteps
from lockstep.world import STARTED


class JobSeries:
    """Run one job, or several in turn, which reuse the modules that the hosts have loaded for the first."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()
        self._pool = NodePool()

    def __enter__(self) -> JobSeries:
        return self

    def __exit__(self, *error: object) -> None:
        with self._runner:
            self._runner.run(self._pool.close())

    def run(
        self,
        plan: JobPlan,
        output: OutputPlan,
        failure_code: int | None = None,
        steps: JobSteps | None = None,
        end: JobEnd | None = None,
    ) -> int:
        """Execute a plan and wait for its end.

        Args:
            output: How the workers' lines are shown and stored.
            failure_code: The exit code if a worker failed; None: the worker's exit code.
            steps: Receives the observed steps, if the plan's variables ask for them.
            end: Receives how the job ended.

        Returns:
            The job's exit code: 0; that of the worker that failed first (128 + N if signal N ended it); STOPPED if the
            workers stopped on request after a checkpoint; 128 + N if signal N to the launcher ended the job.

        Raises:
            ConfigError: The output's folder cannot be written.
        """
        plan = replace(plan, environment={**plan.environment, STARTED: f"{time.time():.3f}"})
        display = Display(output)
        try:
            job = JobRun(plan, display, self._pool, steps, end=end)
            outcome = self._runner.run(job.run(goes_on=lambda outcome: not outcome.code))
            job.report(outcome)
        finally:
            display.close()
        return outcome.exit_code(failure_code)


def collect(jobs: JobSeries, plan: JobPlan, mark: str) -> tuple[int, list[Any], str]:
    """Run a plan without showing its output; a hang ends it, which users would not see.

    Args:
        mark: What begins the lines that workers send (`lockstep.files.output.send_line`).

    Returns:
        The job's exit code, what the workers have sent, and what the job wrote to stderr.
    """
    output, log = io.BytesIO(), io.BytesIO()
    with redirect_stdout(io.TextIOWrapper(output)) as out, redirect_stderr(io.TextIOWrapper(log)) as errors:
        code = jobs.run(replace(plan, ends_hangs=True), OutputPlan(plan.workers, prefixed=False))
        out.flush()
        errors.flush()
        lines, rest = (stream.getvalue().decode(errors="replace") for stream in (output, log))
    return code, received(lines.split("\n"), mark), rest
