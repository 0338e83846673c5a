"""Find the first of several failures, and report it."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.errors import LOST_PEER, StoppedError


@dataclass(frozen=True)
class Failure:
    """A worker that failed or, with rank -1, a host's part of the launcher that disconnected.

    Args:
        host: Its host; "" if the job has only one.
        code: Its exit code, or minus the signal that ended it.
        text: Its error message or traceback.
        time: When it was detected, in seconds.
        lost_peer: It failed only because another worker failed or disconnected.
        log: The file with its output.
        final: It would fail again after a restart.
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
        return 128 - self.code if self.code < 0 else self.code

    @property
    def is_consequence(self) -> bool:
        """Whether this is only a consequence of another worker's exit."""
        return self.lost_peer or any(words in self.text for words in LOST_PEER)

    def describe(self, size: int) -> str:
        """Return the report: what happened where, the log, and at the end the worker's own message."""
        if self.rank < 0:
            return f"lockstep: {self.text}; the others were stopped"
        if self.hung:
            return "lockstep: the job hung; all workers were stopped"
        where = f" on {self.host}" if self.host else ""
        hint = " (possibly out of memory)" if self.code == -signal.SIGKILL else ""
        how = f"{describe_exit(self.code)}{hint}; the others were stopped"
        lines = [f"lockstep: worker {self.rank} of {size}{where} {how}"]
        if self.log:
            lines.append(f"its log: {self.log}")
        if self.text:
            lines.append(self.text)
        return "\n".join(lines)


def first(failures: Sequence[Failure]) -> Failure:
    """Return the root cause: the earliest worker error; else the earliest signal, lost host or stop."""
    return min(failures, key=lambda failure: (_kind(failure), failure.time, failure.rank))


def _kind(failure: Failure) -> int:
    if failure.is_consequence:
        return 2
    is_stop = failure.code == StoppedError.exit_code  # also that of workers ended because another failed
    return 1 if failure.code < 0 or failure.rank < 0 or is_stop else 0


def describe_exit(code: int) -> str:
    """Return how a process ended, from its exit code or minus the signal that ended it."""
    if code >= 0:
        return f"failed with exit code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"
