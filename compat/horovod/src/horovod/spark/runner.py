"""Run a function as Horovod workers in the tasks of a Spark job, with horovod.spark's arguments and error messages."""

from __future__ import annotations

import itertools
import logging
import os
import pickle
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import Any, NoReturn

import pyspark

from horovod.runner.common.util.timeout import Timeout
from horovod.spark.task import END_OF_ERROR, run_task
from lockstep.launch.controller.run_function import PROCESS_FAILED, pack_call
from lockstep.launch.plan.timings import Timings

POLL_SECONDS = 0.1
DEFAULT_SECONDS = "600"
NO_TASKS = (
    "Timed out waiting for {activity}. Please check that you have enough resources to run all Horovod processes. Each "
    "Horovod process runs in a Spark task. You may need to increase the start_timeout parameter to a larger value if "
    "your Spark resources are allocated on-demand."
)
LOGS = "the workers' output is in the logs of Spark's executors; for a file of each worker, open it in the function"
REFUSED = {"stdout": LOGS, "stderr": LOGS, "executable": "the workers use the tasks' Python; set spark.pyspark.python"}
_numbers = itertools.count()
_log = logging.getLogger(__name__)


def run(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    start_timeout: float | None = None,
    use_mpi: bool | None = None,
    use_gloo: bool | None = None,
    extra_mpi_args: str | None = None,
    env: Mapping[str, str] | None = None,
    stdout: None = None,
    stderr: None = None,
    verbose: int = 1,
    nics: Collection[str] | None = None,
    prefix_output_with_timestamp: bool = False,
    executable: None = None,
) -> list[Any]:
    """Call `fn(*args, **kwargs)` in `num_proc` workers, each in a task of one barrier stage.

    Args:
        num_proc: The number of workers; default `spark.default.parallelism`.
        start_timeout: Seconds within which the tasks must start; default HOROVOD_SPARK_START_TIMEOUT, or 600.
        use_mpi, use_gloo, extra_mpi_args: Not used; torch does the communication.
        env: Environment variables for the workers, added to those of their tasks.
        stdout, stderr, executable: Not supported; must be None.
        nics: The network interfaces to use between hosts; default any.
        prefix_output_with_timestamp: Not used; the executors' logs contain the output as it is.

    Returns:
        The results, by rank.

    Raises:
        TimeoutException: The tasks did not start in time.
        ValueError: An argument is invalid or not supported.
        RuntimeError: A worker or its task failed, or Spark could not run the job. The message of a failed worker starts
            with Horovod's text and contains the traceback of the worker that failed first.
    """
    for name, value in (("stdout", stdout), ("stderr", stderr), ("executable", executable)):
        if value is not None:
            raise ValueError(f"horovod.spark.run: {name} is not supported: {REFUSED[name]}")
    context = pyspark.SparkContext._active_spark_context
    if context is None:
        raise RuntimeError("Could not find an active SparkContext, are you running in a PySpark session?")
    workers = int(context.defaultParallelism if num_proc is None else num_proc)
    if workers < 1:
        raise ValueError(f"num_proc={workers}: must be at least 1")
    if verbose >= 1:
        inferred = " (inferred from spark.default.parallelism)" if num_proc is None else ""
        _log.info("Running %d processes%s...", workers, inferred)
    task = partial(run_task, call=pack_call(fn, args, kwargs), env=dict(env or {}), interfaces=sorted(nics or ()))
    results = _run_stage(context, workers, task, _start_seconds(start_timeout))
    return [pickle.loads(result) for _, result in sorted(results)]


def run_elastic(*args: Any, **kwargs: Any) -> NoReturn:
    """Raise NotImplementedError with the alternatives."""
    raise NotImplementedError(
        "horovod.spark.run_elastic is not supported: Spark ends a barrier stage as a whole. Use horovod.spark.run and "
        "resume from a checkpoint, or, for an elastic job, `horovodrun --min-np` or horovod.ray.RayExecutor"
    )


def _start_seconds(given: float | None) -> float:
    variable = "HOROVOD_SPARK_START_TIMEOUT"
    text = os.environ.get(variable, DEFAULT_SECONDS)
    try:
        return float(text) if given is None else given
    except ValueError:
        raise ValueError(f"{variable}={text}: must be a number of seconds") from None


def _run_stage(context: Any, number: int, task: Callable[..., Any], start_seconds: float) -> list[tuple[int, bytes]]:
    """Run a Spark job of one barrier stage; return what its tasks return."""
    group = f"horovod.spark.run.{next(_numbers)}"
    job: Future[list[tuple[int, bytes]]] = Future()

    def collect() -> None:
        try:
            context.setJobGroup(group, "Horovod Spark Run", interruptOnCancel=True)
            job.set_result(context.parallelize(range(number), number).barrier().mapPartitions(task).collect())
        except BaseException as error:
            job.set_exception(error)

    pyspark.InheritableThread(target=collect, daemon=True).start()
    timeout, has_started = Timeout(start_seconds, NO_TASKS), False
    try:
        while not wait([job], POLL_SECONDS).done:
            has_started = has_started or _has_started(context, group)
            if not has_started:
                timeout.check_time_out_for("Spark tasks to start")
    except BaseException:
        context.cancelJobGroup(group)
        wait([job], Timings().caller_end)
        raise
    if error := job.exception():
        worker = re.search(rf"(worker \d+ (?:failed|was killed).*?){re.escape(END_OF_ERROR)}", str(error), re.DOTALL)
        if worker:
            raise RuntimeError(f"{PROCESS_FAILED} {worker[1]}") from error
        raise RuntimeError(f"{PROCESS_FAILED if has_started else 'Spark job has failed:'} {error}") from error
    return job.result()


def _has_started(context: Any, group: str) -> bool:
    """Return whether the group's stage has started its tasks, which a barrier stage does at once."""
    tracker = context.statusTracker()
    jobs = map(tracker.getJobInfo, tracker.getJobIdsForGroup(group))
    status = context._jsc.sc().statusStore()  # the tracker's own counts of tasks are up to 10 s old
    return any(status.taskCount(stage, 0) for job in jobs if job for stage in job.stageIds)
