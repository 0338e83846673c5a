"""Run jobs without restarts: one, or several in turn."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

from lockstep.launch.controller.job_run import JobRun
from lockstep.launch.controller.job_steps import JobSteps
from lockstep.launch.controller.remote_node import NodePool
from lockstep.launch.output import Display, OutputPlan
from lockstep.launch.plan.job_plan import JobPlan
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
    ) -> int:
        """Execute a plan and wait for its end.

        Args:
            output: How the workers' lines are shown and stored.
            failure_code: The exit code if a worker failed; None: the worker's exit code.
            steps: Receives the observed steps, if the plan's variables ask for them.

        Returns:
            The job's exit code: 0; that of the worker that failed first (128 + N if signal N ended it); STOPPED if the
            workers stopped on request after a checkpoint; 128 + N if signal N to the launcher ended the job.

        Raises:
            ConfigError: The output's folder cannot be written.
        """
        plan = replace(plan, environment={**plan.environment, STARTED: f"{time.time():.3f}"})
        display = Display(output)
        try:
            job = JobRun(plan, display, self._pool, steps)
            outcome = self._runner.run(job.run(goes_on=lambda outcome: not outcome.code))
            job.report(outcome)
        finally:
            display.close()
        return outcome.exit_code(failure_code)
