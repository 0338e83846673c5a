"""Running a command's work in its workers: in this process, in the launcher's, or in N that are started here."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

from lockstep.config.device_choice import BackendChoice, DeviceChoice
from lockstep.errors import INTERRUPTED, ConfigError, LockstepError, StoppedError, tells_of_lost_peer
from lockstep.files.untrusted import printable
from lockstep.launch.controller.restarts import first_hosts
from lockstep.launch.plan.allocation import find_allocation
from lockstep.launch.plan.hosts import names_of_this_machine
from lockstep.launch.plan.job_plan import JobPlan
from lockstep.launch.plan.options import LaunchOptions, plan_from
from lockstep.launch.plan.restart_options import RestartOptions
from lockstep.world import accelerator
from lockstep.world.launcher_environment import Place
from lockstep.world.world import World, connect, disconnect, usable_cores


@dataclass(frozen=True)
class Elastic:
    """Workers that may be started more than once.

    Args:
        words: What they are told besides, by the number of workers at first.
        words_of_now: What they are told besides in any further start.
        can_resize: They stop after a step with a checkpoint when they get SIGUSR1.
    """

    options: RestartOptions
    words: Callable[[int], list[str]]
    words_of_now: Callable[[], list[str]]
    can_resize: bool


def run_workers(
    command: str,
    words: Sequence[str],
    workers: int | Literal["auto"] | None,
    device: DeviceChoice,
    work: Callable[[World], None],
    check: Callable[[int], None] = lambda size: None,
    where: LaunchOptions | None = None,
    backend: BackendChoice = "auto",
    elastic: Elastic | None = None,
) -> int:
    """Do `work` in every worker of the job, and return this process's exit code.

    Inside a launcher such as torchrun this process is one of its workers. Otherwise `workers` of them are started,
    each with the same command line; a single one is this process itself.

    Args:
        workers: How many; None: 1, or as many as an allocation or the hosts have slots.
        check: Called with the number of workers before any is started; raises what should stop the job.
        backend: What carries the gradients.
        where: The hosts, or what else is said of the launch; None: this machine.
        elastic: The workers may be started more than once.
    """
    where = where or LaunchOptions()
    place = Place.from_environment()
    if place.launcher != "none":
        if elastic:
            _check_elastic(place)
            workers = None  # there may be more or fewer now
        return _work(place, device, backend, work, workers, place.local_size if where.is_by_hand else place.size)
    if elastic:
        where = first_hosts(where, elastic.options)
    if workers is None and not where.names_hosts and not find_allocation(os.environ):
        workers = 1
    again = [where.python or sys.executable, "-m", "lockstep", command, *words]
    gpus = partial(_one_a_gpu, device)
    plan = plan_from(where, workers, again, os.environ, usable_cores(), gpus, names_of_this_machine())
    if not plan.by_hand:
        check(plan.workers)
    if elastic:
        elastic.options.check(plan.workers)
        check(elastic.options.max_np or plan.workers)
        plan = replace(plan, command=(*plan.command, *elastic.words(plan.workers)))
    elif plan.workers == 1 and plan.is_local and not where.dry_run:
        return _work(place, device, backend, work, workers, 1)
    return _launch(plan, where, gpus, elastic)


def _one_a_gpu(device: str) -> int:
    return max(1, accelerator.count()) if device != "cpu" else 1


def _check_elastic(place: Place) -> None:
    if place.snapshots is None:
        raise ConfigError(
            f"--max-restarts and its like are for who starts the workers, but {place.launcher} has started this one: "
            f"give them to `lockstep run`, or start the job by `lockstep train` alone"
        )


def _launch(plan: JobPlan, where: LaunchOptions, gpus: Callable[[], int], elastic: Elastic | None) -> int:
    from lockstep.launch.controller.job import run_job
    from lockstep.launch.controller.restarts import elastic_job, run_elastic_job
    from lockstep.launch.output.display import OutputPlan
    from lockstep.launch.plan.dry_run import describe

    if where.dry_run:
        print(describe(plan))
        return 0
    for note in plan.notes:
        print(note, flush=True)
    output, direct_stdout = OutputPlan(plan.workers, prefixed=False), sys.stdout.isatty()
    if not elastic:
        return run_job(plan, output, direct_stdout=direct_stdout)
    job = elastic_job(plan, where, elastic.options, gpus, elastic.can_resize, elastic.words_of_now)
    return run_elastic_job(job, output, direct_stdout)


def _work(
    place: Place,
    device: DeviceChoice,
    backend: BackendChoice,
    work: Callable[[World], None],
    expected: int | Literal["auto"] | None,
    started: int,
) -> int:
    try:
        if expected not in (None, "auto", started):
            raise ConfigError(f"-np {expected}, but {place.launcher} has started {started} workers; leave -np out")
        with connect(place, device, backend, tell=lambda error: _fail(place, error)) as world:
            work(world)
    except KeyboardInterrupt:
        if place.launcher == "none":
            print("\nlockstep: interrupted; a training run goes on with `--resume auto`", file=sys.stderr)
        return INTERRUPTED
    except StoppedError as error:
        stop = str(error)  # not the error itself, whose traceback holds the model
    except Exception as error:
        return _fail(place, error)
    else:
        return 0
    return _stopped(place, stop)


def _stopped(place: Place, stop: str) -> int:
    """The end of a worker that was asked to stop, as all are; what asks once more shall not change its exit code."""
    from lockstep.train.stopping.requests import ignore_signals

    ignore_signals()
    if error_file := _error_file():
        _write_error_file(error_file, stop, False, StoppedError.exit_code, final=True)
    elif place.launcher == "none":
        print(f"lockstep: {stop}", file=sys.stderr)
    disconnect()
    return StoppedError.exit_code


def _fail(place: Place, error: Exception) -> int:
    """Tell the worker's log, and then the launcher or, where there is none, the terminal."""
    lost_peer = tells_of_lost_peer(error)  # reported after the error that it follows from
    code = error.exit_code if isinstance(error, LockstepError) else 1
    trace = traceback.format_exc().rstrip()
    text = f"error: {error}" if isinstance(error, LockstepError) else trace
    if lost_peer and not isinstance(error, LockstepError):
        text = "error: lost the connection to a peer, which has ended or cannot be reached"
    logger = logging.getLogger("lockstep")
    logs = [handler.baseFilename for handler in logger.handlers if isinstance(handler, logging.FileHandler)]
    if logs:
        logger.error(trace if error.__traceback__ else text)
    text = printable("\n".join([text, *(f"its log: {log}" for log in logs)]))
    if error_file := _error_file():
        final = isinstance(error, LockstepError) and not error.retryable
        _write_error_file(error_file, f"worker {place.rank}: {text}", lost_peer, code, final)
    else:
        print(f"lockstep: {text}", file=sys.stderr)
    return code


def _error_file() -> Path | None:
    """Where torchrun, or Lockstep's node process, looks for a worker's error."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    return Path(path) if path else None


def _write_error_file(path: Path, text: str, lost_peer: bool, code: int, final: bool) -> None:
    """Leave word in torchrun's form, with what our launcher needs to find the first of several failures.

    Args:
        final: The same would come again if the workers were started anew.
    """
    message = {"message": text, "extraInfo": {"py_callstack": text, "timestamp": str(int(time.time()))}}
    ours = {"text": text, "monotonic_seconds": time.monotonic(), "lost_peer": lost_peer, "exit_code": code}
    ours |= {"final": final}
    path.write_text(json.dumps({"message": message, "lockstep": ours}))
