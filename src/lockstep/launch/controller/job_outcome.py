"""How a job ended: its outcome, and the first of several failures."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.diagnosis.explanation import Explanation
from lockstep.errors import LOST_PEER, StoppedError
from lockstep.files.output import say
from lockstep.launch.controller.remote_node import Lost
from lockstep.launch.output import Screen
from lockstep.launch.protocol.messages import Ended, WorkerFailure

STOPPED = StoppedError.exit_code
APART = (
    "lockstep: the {size} workers did not work together: each imported torch, but none created a process group, so "
    "each did all of the work; to share it, a script calls hvd.init(), init_process_group() or lockstep.train.fit()"
)


@dataclass(frozen=True)
class Failure:
    """A worker that failed or, with rank -1, a host's part of the launcher that disconnected.

    Args:
        host: Its host; "" if the job has only one.
        code: Its exit code, or minus the signal that ended it; 0 if others still needed it.
        text: Its error message or traceback.
        time: When it was detected, in seconds.
        lost_peer: It failed only because another worker failed or disconnected.
        log: The file with its output.
        final: It would fail again in another generation.
        hung: The others waited for it; its state has been printed.
    """

    rank: int
    host: str
    code: int
    text: str = ""
    time: float = 0.0
    lost_peer: bool = False
    log: Path | None = None
    final: bool = False
    hung: bool = False

    @property
    def exit_code(self) -> int:
        """The exit code as in a shell: 128 + N for signal N."""
        return 128 - self.code if self.code < 0 else self.code or 1

    @property
    def is_consequence(self) -> bool:
        """Whether this is only a consequence of another worker's exit."""
        return self.lost_peer or any(words in self.text for words in LOST_PEER)

    def brief(self) -> str:
        """Return what happened where, without the worker's message."""
        if self.rank < 0:
            return self.text.partition("\n")[0]
        return f"worker {self.rank}{f' on {self.host}' if self.host else ''} {describe_exit(self.code)}"

    def describe(self, size: int, staying: int = 0) -> str:
        """Return the report: what happened where, the log, and at the end the worker's own message.

        Args:
            staying: How many of the other workers keep their processes.
        """
        others = "the others were stopped"
        if staying:
            others = f"{staying} of the others stay{'s' if staying == 1 else ''}"
        if self.rank < 0:
            return f"lockstep: {self.text}; {others}"
        if self.hung:
            return "lockstep: the job hung; all workers were stopped"
        where = f" on {self.host}" if self.host else ""
        hint = " (possibly out of memory)" if self.code == -signal.SIGKILL else ""
        how = f"{describe_exit(self.code)}{hint}; {others}"
        lines = [f"lockstep: worker {self.rank} of {size}{where} {how}"]
        if self.log:
            lines.append(f"its log: {self.log}")
        if self.text:
            lines.append(self.text)
        return "\n".join(lines)


def first(failures: Sequence[Failure]) -> Failure:
    """Return the root cause: the earliest worker error; else the earliest signal, lost host or stop."""
    return min(failures, key=lambda failure: (_kind(failure), failure.time, failure.rank))


def early_exit(rank: int, host: str, log: Path | None, other: Failure | None) -> Failure:
    """Return the failure of a worker that exited with code 0 too early.

    Args:
        other: The first failure that follows from it.
    """
    text = f"worker {other.rank} {describe_exit(other.code)} because of that" if other else ""
    return Failure(rank, host, 0, "\n".join(filter(None, [text, other.text if other else ""])), log=log)


def failures_on(name: str, ended: Ended | Lost | None, screen: Screen, is_local: bool) -> list[Failure]:
    """Return the failures that the end of a host's part shows.

    Args:
        screen: Has the workers' tracebacks and logs.
        is_local: The job has only this host.
    """
    host = "" if is_local else name

    def of_worker(failure: WorkerFailure) -> Failure:
        rank = failure.rank
        text = failure.text or screen.last_lines(rank)
        seen = screen.seen(rank) or time.monotonic() - failure.age
        return Failure(rank, host, failure.code, text, seen, failure.lost_peer, screen.log_of(rank), failure.final)

    if ended is None:
        return []
    if isinstance(ended, Lost):
        return [Failure(-1, host, 1, f"lost {name}: {ended.why}", ended.seen)]
    if ended.left:
        why = "they wait for a device or a file system"
        say(f"lockstep: {name}: cannot kill the processes {[*ended.left]}: {why}")
    failures = [of_worker(each) for each in ended.failures]
    if ended.error:
        failures.append(Failure(-1, host, 1, f"{name}: {ended.error}", time.monotonic()))
    return failures


def with_unreported(failures: list[Failure], screen: Screen, host_of: Callable[[int], str]) -> list[Failure]:
    """If all failures are consequences, add the workers that printed a traceback but have not exited yet."""
    if not first(failures).is_consequence:
        return failures
    known = {failure.rank for failure in failures}
    unreported = [
        Failure(rank, host_of(rank), 1, screen.last_lines(rank), screen.seen(rank) or 0.0)
        for rank in screen.waiting()
        if rank not in known
    ]
    return [*failures, *unreported]


def _kind(failure: Failure) -> int:
    if failure.is_consequence:
        return 2
    is_stop = failure.code == StoppedError.exit_code  # also that of workers ended because another failed
    return 1 if failure.code < 0 or failure.rank < 0 or is_stop else 0


def describe_exit(code: int) -> str:
    """Return how a process ended, from its exit code or minus the signal that ended it."""
    if not code:
        return "exited with code 0 while others still needed it (an early sys.exit() or return, or fewer batches?)"
    return f"failed with exit code {code}" if code > 0 else f"was ended by {signal_name(-code)}"


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


@dataclass(frozen=True)
class JobOutcome:
    """How a job ended.

    Args:
        code: Its exit code.
        culprit: The failure that ended it.
        trouble: Why it could not start, or continue.
        request: The signal that ended it, or after which it stopped with a checkpoint.
        away: The hosts that disconnected, or failed to start.
        killed: Why the workers were killed; "" if they were not.
        stop_message: The message of a worker that stopped without a request.
        apart: The workers, more than one, have imported torch, and none has joined a process group.
        staying: How many workers wait for another generation on each host that has such workers; if none does, 0 for
            each host in whose memory workers that could not stay have left the job's state.
        must_lead: Rank 0 of that generation has to be one that stays; only such workers had the job's state.
    """

    code: int
    culprit: Failure | None = None
    trouble: Exception | None = None
    request: signal.Signals | None = None
    away: tuple[str, ...] = ()
    killed: str = ""
    stop_message: str = ""
    apart: bool = False
    staying: Mapping[str, int] = field(default_factory=dict)
    must_lead: bool = False

    def exit_code(self, failure_code: int | None) -> int:
        """Return the job's exit code; `failure_code`, if given, replaces that of a failed worker."""
        return self.code if self.culprit is None or failure_code is None else failure_code

    def cause(self) -> dict[str, Any] | None:
        """Return what ended the job, for programs; "" and None do not apply."""
        cause: dict[str, Any] = {"kind": "stop", "rank": None, "host": "", "exit_code": None, "signal": "", "log": ""}
        cause["text"] = str(self.trouble or self.stop_message or self.killed)
        if self.trouble:
            cause |= {"kind": "error", "host": ", ".join(self.away)}
        elif failed := self.culprit:
            cause |= {"kind": "host", "host": failed.host, "text": failed.text, "log": str(failed.log or "")}
            if failed.rank >= 0:
                cause |= {"kind": "hang" if failed.hung else "worker", "rank": failed.rank}
            if cause["kind"] == "worker":
                cause |= {"signal": signal_name(-failed.code)} if failed.code < 0 else {"exit_code": failed.code}
        elif self.request:
            cause["signal"] = self.request.name
        return cause if self.code else None

    @property
    def may_succeed_again(self) -> bool:
        """Whether the job might succeed in another generation of its workers."""
        if self.culprit is None:
            return bool(self.staying)
        return not self.culprit.final

    def message(self, workers: int) -> str:
        """Return how the job of so many workers ended, for the user; "" if there is nothing to say."""
        if self.trouble:
            return f"lockstep: {self.trouble}"
        if self.culprit:
            return self.culprit.describe(workers, sum(self.staying.values()))
        if self.code == STOPPED:
            by = f" by {self.request.name}" if self.request else ""
            how = f"stopped{by} after a checkpoint (exit code {STOPPED}); `--resume auto` continues from it"
            return f"lockstep: {self.stop_message or how}"
        if self.request and self.code:
            return f"lockstep: stopped by {self.request.name}; {self.killed or 'all workers have exited'}"
        return APART.format(size=workers) if self.apart else ""


@dataclass
class JobEnd:
    """How a job ended, over all generations of its workers, for programs; None: unknown.

    Args:
        message: What the launcher printed about it, in one line.
        hangs: The ranks that the others waited for, each time, and the lines that were printed.
    """

    exit_code: int | None = None
    message: str = ""
    cause: dict[str, Any] | None = None
    workers: int | None = None
    restarts: int | None = None
    hangs: list[dict[str, Any]] | None = None
    stragglers: Sequence[Mapping[str, Any]] | None = None
    findings: Sequence[str] | None = None
    verdict: Sequence[str] | None = None

    def add(self, outcome: JobOutcome, workers: int | None = None, hangs: Sequence[Explanation] = ()) -> None:
        """Add how a generation ended, or why there is none."""
        self.exit_code, self.cause = outcome.code, outcome.cause()
        self.message = outcome.message(workers or 0).partition("\n")[0].removeprefix("lockstep: ")
        if workers:
            self.workers, self.restarts = workers, self.restarts or 0
            shown = [{"ranks": hang.culprits, "lines": hang.lines, "stacks": hang.stacks} for hang in hangs]
            self.hangs = [*(self.hangs or ()), *shown]
