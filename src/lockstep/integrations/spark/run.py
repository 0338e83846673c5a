"""Run functions as Horovod workers in Spark tasks, with horovod.spark's arguments and error messages."""

from __future__ import annotations

import itertools
import logging
import os
import secrets
import signal
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TextIO

import pyspark

from lockstep.integrations.seats import gpu_variables, interface_variables, worker_variables
from lockstep.integrations.spark import task
from lockstep.integrations.spark.messages import StartWorker
from lockstep.integrations.spark.task_server import TaskServer, TaskWorker
from lockstep.integrations.timeout import Timeout
from lockstep.launch.controller.elastic_driver import Driver, HostSlot, JobFailedError
from lockstep.launch.controller.run_function import WORKER_FAILED, pack_call, results
from lockstep.launch.output.display import Name, OutputPlan
from lockstep.launch.plan.elastic_rules import ElasticRules
from lockstep.launch.plan.hosts import Host
from lockstep.launch.plan.timings import Timings
from lockstep.world.store import LOOPBACK, serve_store

POLL_SECONDS = 0.05
DEFAULT_SECONDS = "600"
KEY_BYTES = 32
NO_TASKS = (
    "Timed out waiting for {activity}. Please check that you have enough resources to run all Horovod processes. Each "
    "Horovod process runs in a Spark task. You may need to increase the start_timeout parameter to a larger value if "
    "your Spark resources are allocated on-demand."
)
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
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
    verbose: int = 1,
    nics: Collection[str] | None = None,
    prefix_output_with_timestamp: bool = False,
    executable: str | None = None,
) -> list[Any]:
    """Call `fn(*args, **kwargs)` in `num_proc` workers, each in a task of one barrier stage.

    Args:
        num_proc: The number of workers; default `spark.default.parallelism`.
        start_timeout: Seconds within which the tasks must start; default HOROVOD_SPARK_START_TIMEOUT, or 600.
        use_mpi, use_gloo, extra_mpi_args: Not used; torch does the communication.
        env: Environment variables for the workers, added to those of their tasks.
        stdout, stderr: Streams for the workers' output; default this program's.
        nics: The network interfaces to use between hosts; default any.
        executable: The workers' Python; default the tasks'.

    Returns:
        The results, by rank.

    Raises:
        TimeoutException: The tasks did not start in time.
        RuntimeError: A worker or its task failed, or Spark could not run the job. The message of a failed worker starts
            with Horovod's text and contains the traceback of the worker that failed first.
    """
    context = _context()
    workers = _number(context, num_proc, verbose)
    call = pack_call(fn, args, kwargs)
    show = _Show(workers, prefix_output_with_timestamp, stdout, stderr)
    with _tasks(context, workers, True, show) as (server, job, folder):
        _wait_for_tasks(server, job, workers, _seconds("HOROVOD_SPARK_START_TIMEOUT", start_timeout))
        tasks = server.tasks[:workers]
        hosts = list(dict.fromkeys(each.host for each in tasks))
        tasks.sort(key=lambda each: hosts.index(each.host))
        address = _address(context)
        store, port = serve_store(address)
        environments = worker_variables(
            [each.host for each in tasks], [each.gpus for each in tasks], address, port, sorted(nics or ())
        )
        running = [
            each.start(rank, StartWorker({**variables, **(env or {})}, call, executable))
            for rank, (each, variables) in enumerate(zip(tasks, environments, strict=True))
        ]
        failure = _wait_for_workers(running)
        del store
        return results(folder, WORKER_FAILED if failure else 0, failure)


def run_elastic(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    start_timeout: float | None = None,
    elastic_timeout: float | None = None,
    reset_limit: int | None = None,
    env: Mapping[str, str] | None = None,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
    verbose: int = 1,
    nics: Collection[str] | None = None,
    prefix_output_with_timestamp: bool = False,
    min_np: int | None = None,
    max_np: int | None = None,
) -> list[Any]:
    """Call `fn(*args, **kwargs)`, decorated with `hvd.elastic.run`, in a changing number of workers.

    A failed worker is replaced in the same task; a failed task is replaced if Spark starts another one
    (spark.task.maxFailures). See `run` for the other arguments.

    Args:
        num_proc: The number of workers at the start; default `spark.default.parallelism`.
        min_num_proc: The minimum number of workers; with fewer, the job waits. Default `num_proc`.
        max_num_proc: The maximum number of workers, and the number of Spark tasks; default `num_proc`.
        elastic_timeout: Seconds to wait for enough workers; default HOROVOD_ELASTIC_TIMEOUT, or 600.
        reset_limit: How many times the job may restart with other workers; None for no limit.
        min_np, max_np: Deprecated names of `min_num_proc` and `max_num_proc`.

    Returns:
        The results of the workers that finished, by rank.

    Raises:
        TimeoutException: The first tasks did not start in time.
        RuntimeError: The job cannot continue (the message starts with Horovod's text), or Spark could not run it.
    """
    for old, new in ((min_np, "min"), (max_np, "max")):
        if old is not None:
            warnings.warn(f"{new}_np is deprecated, use {new}_num_proc instead", DeprecationWarning, stacklevel=2)
    context = _context()
    initial = _number(context, num_proc, verbose)
    least, most = min_num_proc or min_np or initial, max_num_proc or max_np or initial
    if not 1 <= least <= initial <= most:
        raise ValueError(
            f"min_num_proc={least}, num_proc={initial}, max_num_proc={most}: must be at least 1 and in ascending order"
        )
    elastic_seconds = _seconds("HOROVOD_ELASTIC_TIMEOUT", elastic_timeout)
    rules = ElasticRules(
        initial=initial, minimum=least, maximum=most, timeout_seconds=elastic_seconds, reset_limit=reset_limit
    )
    call = pack_call(fn, args, kwargs)
    show = _Show(most, prefix_output_with_timestamp, stdout, stderr)
    with _tasks(context, most, False, show) as (server, job, folder):
        _wait_for_tasks(server, job, initial, _seconds("HOROVOD_SPARK_START_TIMEOUT", start_timeout))

        def hosts() -> list[Host]:
            return [Host(name, number) for name, number in Counter(each.host for each in server.tasks).items()]

        def start(slot: HostSlot, variables: Mapping[str, str]) -> TaskWorker | None:
            here = [each for each in server.tasks if each.host == slot.host]
            free = next((each for each in here if each.is_idle), None)
            if free is None:
                return None
            extra = {**interface_variables(nics or ()), **gpu_variables(free.gpus, slot.number, len(here))}
            extra["HOROVOD_ELASTIC_TIMEOUT"] = str(elastic_seconds)
            return free.start(slot.number, StartWorker({**variables, **extra, **(env or {})}, call, None))

        driver = Driver(rules, hosts, start, _address(context))
        try:
            while not driver.step():
                job.check()
                time.sleep(POLL_SECONDS)
        except JobFailedError as error:
            return results(folder, WORKER_FAILED, str(error), elastic=True)
        finally:
            driver.end()
        if len(server.tasks) < most:
            job.cancel()  # tasks that Spark starts later could not connect
        return results(folder, 0, "")


def _context() -> Any:
    context = pyspark.SparkContext._active_spark_context
    if context is None:
        raise RuntimeError("Could not find an active SparkContext, are you running in a PySpark session?")
    return context


def _number(context: Any, number: int | None, verbose: int) -> int:
    inferred = number is None
    number = int(context.defaultParallelism if number is None else number)
    if number < 1:
        raise ValueError(f"num_proc={number}: must be at least 1")
    if verbose >= 1:
        _log.info("Running %d processes%s...", number, " (inferred from spark.default.parallelism)" if inferred else "")
    return number


def _seconds(variable: str, given: float | None) -> float:
    """Return `given`, or else the environment variable's value, or else the default."""
    text = os.environ.get(variable, DEFAULT_SECONDS)
    try:
        return float(text) if given is None else given
    except ValueError:
        raise ValueError(f"{variable}={text}: must be a number of seconds") from None


def _address(context: Any) -> str:
    """Return this program's address, as reachable from the tasks."""
    if context.master == "local" or context.master.startswith("local["):
        return LOOPBACK
    return str(context.getConf().get("spark.driver.host"))


class _Show:
    """Prints the workers' lines, prefixed with their ranks."""

    def __init__(self, workers: int, timestamps: bool, stdout: TextIO | None, stderr: TextIO | None) -> None:
        self._plan = OutputPlan(workers, timestamps)
        self._streams = {"stdout": stdout, "stderr": stderr}
        self._lock = threading.Lock()

    def __call__(self, rank: int, name: Name, lines: Sequence[bytes]) -> None:
        stream = self._streams[name] or getattr(sys, name)
        prefix = self._plan.prefix(rank, name)
        with self._lock:
            try:
                stream.write(b"".join(prefix + line for line in lines).decode(errors="replace"))
                stream.flush()
            except Exception as error:  # for example, a closed file; the worker continues
                _log.warning("cannot print the %s of worker %d: %s", name, rank, error)


class _SparkJob:
    """The Spark job whose tasks host the workers; runs in a separate thread."""

    def __init__(self, context: Any, tasks: int, barrier: bool, address: tuple[str, int], key: bytes) -> None:
        self.error: BaseException | None = None
        self._context = context
        self._group = f"horovod.spark.run.{next(_numbers)}"
        self._seats = context.parallelize(range(tasks), tasks)
        self._seats = self._seats.barrier() if barrier else self._seats
        self._serve = partial(_serve, address=address, key=key)
        self._thread = pyspark.InheritableThread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._context.setJobGroup(self._group, "Horovod Spark Run", interruptOnCancel=True)
            self._seats.mapPartitionsWithIndex(self._serve).collect()
        except BaseException as error:
            self.error = error

    def check(self) -> None:
        """Raise RuntimeError if the job has failed."""
        if self.error is not None:
            raise RuntimeError(f"Spark job has failed: {self.error}") from self.error

    def cancel(self) -> None:
        self._context.cancelJobGroup(self._group)

    def join(self) -> None:
        self._thread.join(Timings().caller_end)


def _serve(index: int, seats: Iterator[int], address: tuple[str, int], key: bytes) -> Iterator[None]:
    task.serve(index, address, key)
    return iter(())


@contextmanager
def _tasks(context: Any, number: int, barrier: bool, show: _Show) -> Iterator[tuple[TaskServer, _SparkJob, Path]]:
    """Run Spark tasks that connect to this program; also yield a folder for their workers' results."""
    key, address = secrets.token_bytes(KEY_BYTES), _address(context)
    with TemporaryDirectory(prefix="lockstep-spark-") as name:
        job = None
        try:
            with TaskServer(address, key, show, Path(name)) as server:
                job = _SparkJob(context, number, barrier, (address, server.port), key)
                try:
                    yield server, job, Path(name)
                except BaseException:
                    job.cancel()
                    raise
        finally:
            if job:
                job.join()


def _wait_for_tasks(server: TaskServer, job: _SparkJob, number: int, seconds: float) -> None:
    timeout = Timeout(seconds, NO_TASKS)
    while len(server.tasks) < number:
        job.check()
        timeout.check_time_out_for("Spark tasks to start")
        time.sleep(POLL_SECONDS)


def _wait_for_workers(workers: Sequence[TaskWorker]) -> str:
    """Wait until all workers exit; return the first failure, "" for none. After a failure, stop the others."""
    while True:
        ends = [worker.poll() for worker in workers]
        failure = next((f"worker {worker.rank} {how}" for worker, how in zip(workers, ends, strict=True) if how), "")
        if failure or all(how is not None for how in ends):
            break
        time.sleep(POLL_SECONDS)
    if failure:
        timings = Timings()
        _wait(workers, timings.settle)
        for number, seconds in ((signal.SIGTERM, timings.worker_end), (signal.SIGKILL, timings.forced_end)):
            for worker in workers:
                worker.end(number)
            _wait(workers, seconds)
    return failure


def _wait(workers: Sequence[TaskWorker], seconds: float) -> None:
    """Wait until all workers exit, for at most `seconds`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(worker.poll() is None for worker in workers):
        time.sleep(POLL_SECONDS)
