"""Turn the exceptions of a Lockstep worker into its exit code and a message to the launcher or the terminal."""

from __future__ import annotations

import logging
import signal
import traceback
from collections.abc import Callable

from lockstep.config.schema import BackendChoice, DeviceChoice
from lockstep.config.values import NOTICE
from lockstep.errors import INTERRUPTED, LockstepError, StoppedError, is_lost_peer, printable, reached_limit
from lockstep.files.output import report_to_launcher, say
from lockstep.world.generations import survive
from lockstep.world.launcher_environment import RankInfo
from lockstep.world.world import World, connect, disconnect

REQUESTS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, *NOTICE)
"""Signals on which a worker stops after the current step, with a checkpoint."""


def exit_code_of(
    work: Callable[[World], None],
    rank_info: RankInfo,
    device: DeviceChoice,
    backend: BackendChoice,
    check: Callable[[], None] = lambda: None,
) -> int:
    """Connect to the other workers, do the work, and return this process's exit code.

    Args:
        check: Called first; raises an error to end the worker before it connects.
    """
    try:
        check()
        survive(lambda: _connect_and_work(work, device, backend))
    except KeyboardInterrupt:
        if rank_info.launcher == "none":
            say("\nlockstep: interrupted")
        return INTERRUPTED
    except StoppedError as error:
        stop = str(error)  # not the error, whose traceback references the model
    except Exception as error:
        return _fail(RankInfo.from_environment(), error)  # which may have changed
    else:
        return 0
    for number in REQUESTS:
        signal.signal(number, signal.SIG_IGN)
    end_stopped(rank_info, stop)
    return StoppedError.exit_code


def _connect_and_work(work: Callable[[World], None], device: DeviceChoice, backend: BackendChoice) -> None:
    rank_info = RankInfo.from_environment()
    with connect(rank_info, device, backend, report=lambda error: _fail(rank_info, error)) as world:
        work(world)


def end_stopped(rank_info: RankInfo, stop: str) -> None:
    """Report a stop, and disconnect (collective)."""
    is_reported = report_to_launcher(stop, False, StoppedError.exit_code, final=True)
    if not is_reported and rank_info.launcher == "none":
        say(f"lockstep: {stop}")
    disconnect()


def _fail(rank_info: RankInfo, error: Exception) -> int:
    """Write the error to the worker's log and to the launcher or, without one, the terminal; return the exit code."""
    lost_peer = is_lost_peer(error)  # reported after the error that caused it
    trace = traceback.format_exc().rstrip()
    code, final = 1, False
    if isinstance(error, LockstepError):
        code, final, text = error.exit_code, not error.retryable, f"error: {error}"
    elif lost_peer:
        text = "error: lost the connection to a peer, which exited or is unreachable"
    else:
        text = trace
    if limit := reached_limit(error):
        text = f"{trace}\nlockstep: error: {limit}"
    logger = logging.getLogger("lockstep")
    logs = [handler.baseFilename for handler in logger.handlers if isinstance(handler, logging.FileHandler)]
    if logs:
        logger.error(trace if error.__traceback__ else text)
    text = printable("\n".join([text, *(f"its log: {log}" for log in logs)]))
    if not report_to_launcher(f"worker {rank_info.rank}: {text}", lost_peer, code, final):
        say(f"lockstep: {text}")
    return code
