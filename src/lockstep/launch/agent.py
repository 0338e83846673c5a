"""One node's agent: torchrun's elastic agent, with a rendezvous that listens on loopback alone.

The agent starts the workers, watches them and ends all of them when one fails. torch's own rendezvous would listen on
every address; here the launcher serves the job's store on a loopback socket, and the workers are its clients.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import uuid
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, LogsDest, SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous.api import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from lockstep.launch import tether
from lockstep.launch.output import Output, OutputPlan, say
from lockstep.launch.plan import LocalPlan, handed_on, horovod_variables
from lockstep.launch.signals import on_stopping
from lockstep.store import LOOPBACK, serve_store


class LoopbackRendezvous(RendezvousHandler):
    """The meeting point of one agent with itself: a store on 127.0.0.1, served by this process."""

    def __init__(self) -> None:
        self._store, self._port = serve_store()
        self._id = uuid.uuid4().hex
        self._closed = False

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        return RendezvousInfo(self._store, 0, 1, RendezvousStoreInfo(LOOPBACK, self._port))

    def get_backend(self) -> str:
        return "lockstep-loopback"

    def get_run_id(self) -> str:
        return self._id

    def is_closed(self) -> bool:
        return self._closed

    def set_closed(self) -> None:
        self._closed = True

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        self._closed = True
        return True


class WorkerSpecs(DefaultLogsSpecs):
    """What each worker gets beside torchrun's variables: Horovod's, and a place for its output.

    Without an `output` the workers write where the launcher does.
    """

    def __init__(self, folder: str, output: Output | None) -> None:
        super().__init__(log_dir=folder)
        self._output = output

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        destinations = super().reify(envs)
        for local_rank, variables in envs.items():
            variables.update(horovod_variables(variables))
            if self._output:
                rank = int(variables["RANK"])
                destinations.stdouts[local_rank] = self._output.open(rank, "stdout").path
                destinations.stderrs[local_rank] = self._output.open(rank, "stderr").path
        return destinations


def run_local(plan: LocalPlan, output_plan: OutputPlan | None = None, failure_code: int | None = None) -> int:
    """Carry out a plan and wait for its end.

    Args:
        output_plan: How the workers' lines are shown; None: the workers write to the launcher's own output.
        failure_code: The exit code when a worker has failed; None: the worker's own.

    Returns:
        The job's exit code: 0, or that of the worker that failed first (128 + N where signal N ended it).
    """
    variables = {**handed_on(os.environ), **plan.environment}
    os.environ.clear()
    os.environ.update(variables)
    _silence_agent()
    caught = on_stopping(_raise_signal)
    names = [number.name for number in (*caught, signal.SIGQUIT)]
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ",".join(names)  # the agent replaces the handlers by its own
    with TemporaryDirectory(prefix="lockstep-") as folder:
        try:
            with ExitStack() as stack:
                output = stack.enter_context(Output(output_plan)) if output_plan else None
                result = _agent(plan, WorkerSpecs(folder, output)).run()
        except SignalException as error:
            say(f"\nlockstep: stopped by {error.sigval.name}; all workers have ended")
            return 128 + int(error.sigval)
        code = _report(result, plan.workers)
        return failure_code if code and failure_code is not None else code


def _agent(plan: LocalPlan, specs: WorkerSpecs) -> LocalElasticAgent:
    entrypoint, *arguments = tether.command(plan.command)
    spec = WorkerSpec(
        role="worker",
        local_world_size=plan.workers,
        entrypoint=entrypoint,
        args=tuple(word.replace("$", "$$") for word in arguments),  # the agent takes "$$" and ${local_rank} for macros
        rdzv_handler=LoopbackRendezvous(),
        max_restarts=0,
        monitor_interval=0.1,
    )
    return LocalElasticAgent(spec, specs, shutdown_timeout=10)


def _silence_agent() -> None:
    """torch's agent logs each failure in its own words, too; `_report` says it once."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def _raise_signal(number: int, frame: Any) -> None:
    raise SignalException(f"launcher got signal {number}", signal.Signals(number))


def _report(result: RunResult, workers: int) -> int:
    """Say which worker failed first, and return the job's exit code."""
    if not result.is_failed():
        return 0
    rank, failure = min(result.failures.items(), key=lambda item: _order_of_failure(item[1]))
    error = _error_of(failure)
    code = int(error.get("exit_code", failure.exitcode))  # a worker that has failed may be ended while it closes
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"failed with exit code {code}"
    say(f"lockstep: worker {rank} of {workers} {how}; the others were stopped")
    if "text" in error:
        say(error["text"])
    return 128 - code if code < 0 else code


def _order_of_failure(failure: ProcessFailure) -> tuple[int, int]:
    """Most telling first: an error of the worker's own, a signal, then the loss of a peer, which only follows."""
    error = _error_of(failure)
    kind = 1 if not error else 2 if error.get("lost_peer") else 0
    return kind, int(error.get("time_ns", 0))


def _error_of(failure: ProcessFailure) -> dict[str, Any]:
    try:
        error = json.loads(Path(failure.error_file).read_text())["lockstep"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return error if isinstance(error, dict) else {}
