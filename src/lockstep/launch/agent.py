"""One node's agent: torchrun's elastic agent over a meeting point whose ranks are fixed beforehand.

It starts this node's workers, watches them and ends all of them when one fails. The node process
(`lockstep.launch.node`) starts it as `python -P -m lockstep.launch.agent FD` with the job on its standard input, and
reads from the descriptor FD what becomes of the workers. SIGQUIT, which the node process sends and which its death
brings, ends the workers.
"""

from __future__ import annotations

import hmac
import json
import logging
import os
import shutil
import signal
import socket
import sys
import threading
import time
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import Store, TCPStore
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, LogsDest, SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous.api import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from lockstep.launch import tether
from lockstep.launch.family import adopt_orphans, end_with_parent, kill_descendants
from lockstep.launch.leftovers import remove_dead_sockets
from lockstep.launch.plan import horovod_variables
from lockstep.launch.reach import proof
from lockstep.launch.snapshot_memory import SnapshotMemory
from lockstep.launch.wire import pack
from lockstep.place import RESTART_COUNT, SNAPSHOTS

END_SECONDS = 3  # from SIGTERM to SIGKILL; with the 9 s of silence that tell of a lost link, below 15
VERDICT, TERMS, FINISHED, LEFT = (f"lockstep/{name}" for name in ("verdict", "terms", "finished", "left"))
PROOF = "lockstep/proof"
WATCH_SECONDS = 1.0
FINISHED_POLL_SECONDS = 0.05
SETTLE_SECONDS = 0.5  # in which failures that belong together become known
LEFT_ALONE = (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGTSTP)
HANDLED = (*LEFT_ALONE, signal.SIGTERM, signal.SIGQUIT)


@dataclass(frozen=True)
class AgentJob:
    """What an agent has to know.

    Args:
        node: Its number among `nodes`.
        slots: Workers on each node; empty where the nodes are started by hand and do not know of each other.
        run_id: The job's name, which the workers get.
        secret: By which the agents know each other; empty where nodes are started by hand and were given none.
        streams: For each local rank, the descriptors of its stdout (-1: the agent's own) and stderr.
        address: Where the meeting point is; the first node serves it on the socket `listener`.
        patience: Seconds to wait for the other nodes.
        scratch: A folder for torch's own files, which this process removes; the node process does when this is killed.
        snapshots: The folder in memory that the node process keeps; this process removes it when that was killed.
        restart: How often the workers have been started anew before, of `max_restarts` times.
    """

    node: int
    nodes: int
    workers: int
    slots: list[int]
    command: list[str]
    bind: str
    streams: list[list[int]]
    run_id: str
    secret: str = field(repr=False)
    address: str
    port: int
    listener: int
    patience: float
    parent: int
    scratch: str
    snapshots: str
    restart: int
    max_restarts: int


class FixedRendezvous(RendezvousHandler):
    """A meeting point at which every node has its number beforehand: torchrun's own would sort them by host name."""

    def __init__(self, job: AgentJob) -> None:
        self._job = job
        self._run_id = job.run_id
        self._closed = False
        self._store: Store | None = None

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        job = self._job
        serves = job.listener >= 0
        self._store = TCPStore(
            job.address,
            job.port,
            is_master=serves,
            wait_for_workers=False,
            timeout=timedelta(seconds=job.patience),
            master_listen_fd=job.listener if serves else None,
        )
        if job.secret:
            introduce(self._store, job.secret, job.node, job.nodes)
        if not job.slots:
            self._agree(self._store)
        return RendezvousInfo(self._store, job.node, job.nodes, RendezvousStoreInfo(job.address, job.port))

    def _agree(self, store: Store) -> None:
        """Where nodes are started by hand: the first one's number of nodes and name of the job hold for all."""
        job = self._job
        if job.node == 0:
            store.set(TERMS, json.dumps([job.nodes, job.run_id]))
        nodes, self._run_id = json.loads(store.get(TERMS))
        if nodes != job.nodes:
            raise ValueError(f"this is one of {job.nodes} nodes, but the first node says {nodes}; give both the same")

    def get_backend(self) -> str:
        return "lockstep"

    def get_run_id(self) -> str:
        return self._run_id

    def is_closed(self) -> bool:
        return self._closed

    def set_closed(self) -> None:
        self._closed = True

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        self._closed = True
        return True


def introduce(store: Store, secret: str, node: int, nodes: int) -> None:
    """Prove to the other agents that this one knows the job's secret, and see that they do, before anything else.

    torch's store lets everyone in who can reach it; what a stranger may do there, docs/explanation/security.md says.

    Raises:
        ValueError: Somebody who does not know the secret has taken a node's place, or serves the store.
        RuntimeError: An agent does not come.
    """
    store.set(f"{PROOF}/{node}", proof(secret, f"agent {node}").hex())
    for other in range(1, nodes) if node == 0 else (0,):
        said = store.get(f"{PROOF}/{other}")
        if not hmac.compare_digest(said, proof(secret, f"agent {other}").hex().encode()):
            raise ValueError(
                f"whoever answers as node {other} does not know this job's secret: it is another job's, or a stranger"
            )


class WorkerSpecs(DefaultLogsSpecs):
    """What each worker gets beside torchrun's variables: Horovod's, and its streams."""

    def __init__(self, folder: str, job: AgentJob) -> None:
        super().__init__(log_dir=folder)
        self._job = job

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        destinations = super().reify(envs)
        for local_rank, variables in envs.items():
            variables.update(horovod_variables(variables, self._job.slots))
            variables[RESTART_COUNT] = str(self._job.restart)
            variables["TORCHELASTIC_MAX_RESTARTS"] = str(self._job.max_restarts)
            if self._job.snapshots:
                variables[SNAPSHOTS] = self._job.snapshots
            stdout, stderr = self._job.streams[local_rank]
            if stdout >= 0:
                destinations.stdouts[local_rank] = f"/dev/fd/{stdout}"
            destinations.stderrs[local_rank] = f"/dev/fd/{stderr}"
        return destinations


class Agent(LocalElasticAgent):
    """torch's agent, which tells of its workers' start, and ends them in the same way whatever the reason is."""

    def __init__(self, job: AgentJob, specs: WorkerSpecs, report: int) -> None:
        entrypoint, *arguments = tether.command(job.command, bind=job.bind)
        spec = WorkerSpec(
            role="worker",
            local_world_size=job.workers,
            entrypoint=entrypoint,
            args=tuple(word.replace("$", "$$") for word in arguments),  # "$$" and ${local_rank} are macros there
            rdzv_handler=FixedRendezvous(job),
            max_restarts=0,
            monitor_interval=0.1,
        )
        super().__init__(spec, specs)
        self._report = report
        self._by_hand = not job.slots
        self.watch: Watch | None = None
        self.failed: dict[int, float] = {}  # by rank: when it was seen
        self.stopping = False

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        if self._by_hand:
            self.watch = Watch(worker_group.store)
            self.watch.start()
        handlers = {number: signal.getsignal(number) for number in HANDLED}
        pids: dict[int, Any] = super()._start_workers(worker_group)
        for number, handler in handlers.items():  # torch 2.8 ignores TORCHELASTIC_SIGNALS_TO_HANDLE and replaces them
            signal.signal(number, handler)
        first = worker_group.workers[0]
        started = {"is": "started", "pids": pids, "first_rank": first.global_rank, "size": first.world_size}
        os.write(self._report, pack(started))
        return pids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """torch's, but the others get END_SECONDS, not 30, to end, and those that fail on being ended do not count.

        After a request to stop nobody is ended here: each worker has the time that the launcher gives it.
        """
        goes_on = self._look(worker_group)
        if goes_on and (self.stopping or not self.failed):
            return RunResult(state=WorkerState.HEALTHY)
        if self.failed and self._pcontext:
            os.write(self._report, pack({"is": "failing"}))  # so that other nodes end theirs meanwhile
            settled = time.monotonic() + SETTLE_SECONDS
            while self._look(worker_group) and time.monotonic() < settled:
                time.sleep(0.02)  # a worker that brought others down may end after them
            failed = set(self.failed)
            self._pcontext.close(signal.SIGTERM, END_SECONDS)
        result: RunResult = super()._monitor_workers(worker_group)
        if self.failed:
            result.failures = {rank: failure for rank, failure in result.failures.items() if rank in failed}
        return result

    def _look(self, worker_group: WorkerGroup) -> bool:
        """Note who has failed; whether any worker still runs."""
        handlers: dict[int, Any] = getattr(self._pcontext, "subprocess_handlers", {})
        codes = {rank: handler.proc.poll() for rank, handler in handlers.items()}
        for local_rank, code in codes.items():
            if code:
                self.failed.setdefault(worker_group.workers[local_rank].global_rank, time.monotonic())
        return None in codes.values()

    def _exit_barrier(self) -> None:
        """Wait until all nodes' workers have ended. torch's own wait could not be interrupted by a signal."""
        if self.watch:
            self.watch.finishing = True
        group: Any = self._worker_group
        store, nodes, node = group.store, group.group_world_size, group.group_rank
        try:
            store.add(FINISHED, 1)
            while store.add(FINISHED, 0) < nodes:
                time.sleep(FINISHED_POLL_SECONDS)
            store.add(LEFT, 1)
            patience = time.monotonic() + END_SECONDS
            while node == 0 and store.add(LEFT, 0) < nodes and time.monotonic() < patience:
                time.sleep(FINISHED_POLL_SECONDS)  # this node serves the store to the others
        except RuntimeError:
            pass  # the first node has ended, and so this one does

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = END_SECONDS) -> None:
        if self._pcontext:  # before torch does so, which gives them 30 s; to torch 2.11 no other time can be told
            self._pcontext.close(signal.SIGTERM, END_SECONDS)
        super()._shutdown(signal.SIGTERM)

    def tell_others(self, verdict: dict[str, Any]) -> None:
        """Where nodes are started by hand, let their agents know why the job ends."""
        if not self._by_hand or not verdict["failures"]:
            return
        try:
            store: Any = self._worker_group.store
            store.set(VERDICT, json.dumps({**verdict, "host": socket.gethostname()}))
            time.sleep(2 * WATCH_SECONDS)  # the first node's agent serves this store
        except RuntimeError:
            pass


class Watch(threading.Thread):
    """Ends this node's workers when another node, started by hand and so known to no launcher, has ended."""

    def __init__(self, store: Any) -> None:
        super().__init__(name="lockstep-watch", daemon=True)
        self._store = store.clone()
        self.verdict: dict[str, Any] = {}
        self.finishing = False

    def run(self) -> None:
        try:
            while not self._store.check([VERDICT]):
                time.sleep(WATCH_SECONDS)
            self.verdict = json.loads(self._store.get(VERDICT))
        except RuntimeError:
            if self.finishing:
                return  # the first node, which serves the store, has finished too
            self.verdict = {"host": "the first node", "failures": []}
        os.kill(os.getpid(), signal.SIGQUIT)


def main(report: int) -> int:
    since = time.time()
    job = AgentJob(**json.load(sys.stdin))
    try:
        return _work(job, report)
    finally:
        shutil.rmtree(job.scratch, ignore_errors=True)
        if job.snapshots and os.getppid() != job.parent:
            SnapshotMemory.remove_abandoned(Path(job.snapshots))
        remove_dead_sockets(since)


def _work(job: AgentJob, report: int) -> int:
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    signal.signal(signal.SIGQUIT, _end)
    if not end_with_parent(job.parent, signal.SIGQUIT):
        return 1
    adopt_orphans()
    for number in LEFT_ALONE:
        signal.signal(number, _leave_it)  # what reaches the agent has reached the node process, which decides
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"
    _silence()
    outcome: dict[str, Any] = {"is": "outcome", "failures": [], "ended": False}
    agent = Agent(job, WorkerSpecs(job.scratch, job), report)
    signal.signal(signal.SIGTERM, lambda number, frame: setattr(agent, "stopping", True))
    try:
        outcome["failures"] = _failures(agent.run(), agent.failed)
    except SignalException:
        outcome["ended"] = True
        if agent.watch and agent.watch.verdict:
            outcome["elsewhere"] = agent.watch.verdict
    except (RuntimeError, ValueError, OSError) as error:
        outcome["error"] = str(error)
    signal.signal(signal.SIGQUIT, _leave_it)
    agent.tell_others(outcome)
    outcome["left"] = kill_descendants()
    os.write(report, pack(outcome))
    return 0


def _leave_it(number: int, frame: Any) -> None:
    """Nothing; unlike SIG_IGN, a handler is not inherited by the workers."""


def _end(number: int, frame: Any) -> None:
    raise SignalException(f"agent got signal {number}", signal.Signals(number))


def _silence() -> None:
    """torch's agent logs each failure in its own words, too; the launcher says it once."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def _failures(result: RunResult, seen: dict[int, float]) -> list[dict[str, Any]]:
    """What is told of each failure; ages, because clocks of hosts differ."""
    return [
        {
            "rank": rank,
            "code": failure.exitcode,
            "age": time.monotonic() - seen.get(rank, time.monotonic()),
            **_error_of(failure),
        }
        for rank, failure in result.failures.items()
    ]


def _error_of(failure: ProcessFailure) -> dict[str, Any]:
    """What a worker of Lockstep's own has left in its error file; {} for other programs."""
    try:
        error = json.loads(Path(failure.error_file).read_text())["lockstep"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    if not isinstance(error, dict):
        return {}
    age = time.monotonic() - error["monotonic_seconds"]
    words = {name: error[name] for name in ("text", "lost_peer", "final")}
    return {**words, "code": error["exit_code"], "age": age}


if __name__ == "__main__":
    os._exit(main(int(sys.argv[1])))  # torch's own end would take a second more
