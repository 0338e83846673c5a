"""The step after which each worker ends a pass over the run's loader: different ones are an error.

A worker that leaves the pass, with `break`, calls other collectives than workers that go on, and the backend could mix
their values. So before its next collective it waits until all workers have ended the pass; the job's store has where.
"""

from __future__ import annotations

import json
import time
from contextlib import suppress

from lockstep.errors import ConfigError
from lockstep.files.output import say
from lockstep.world import generations
from lockstep.world.world import World

POLL_SECONDS = 0.05
TOGETHER = (
    "all workers must leave it after the same step: decide by a value that is equal on all, such as world.mean(loss)"
)


class PassEnd:
    """Where this worker and the others have ended the current pass."""

    note_seconds = 10.0  # until a worker that waits for another prints a line

    def __init__(self, world: World):
        self._world = world
        self._left: tuple[int, int] | None = None  # epoch and step, until the workers have compared them
        if world.size > 1:
            world.store().delete_key(self._key(world.rank))  # of an earlier run

    def note(self, epoch: int, step: int, is_early: bool) -> None:
        """Store where this worker left or completed the pass."""
        if self._world.size == 1:
            return
        # A lost connection is reported by the next collective; after a stop there is none.
        with suppress(RuntimeError, ValueError):
            self._world.store().set(self._key(self._world.rank), json.dumps([epoch, step]))
        self._left = (epoch, step) if is_early else None

    def compare(self) -> None:
        """Wait until the others have ended the pass, if this worker has left it; before each collective.

        Raises:
            ConfigError: A worker left or completed it after another step.
            LostPeerError: This generation of the workers is over.
        """
        if self._left is None:
            return
        (epoch, step), self._left = self._left, None
        began, is_noted = time.monotonic(), False
        for rank in range(self._world.size):
            while (other := self._step_of(rank, epoch)) is None:
                generations.check()
                if not is_noted and time.monotonic() - began > self.note_seconds:
                    is_noted = True
                    say(f"lockstep: {self._has_left(step)} and waits for worker {rank}, which has not; {TOGETHER}")
                time.sleep(POLL_SECONDS)
            if other != step:
                raise ConfigError(f"{self._has_left(step)}, and worker {rank} after step {other}; {TOGETHER}")

    def _has_left(self, step: int) -> str:
        return f"worker {self._world.rank} has left the loader's pass after step {step} of the epoch"

    def _step_of(self, rank: int, epoch: int) -> int | None:
        store, key = self._world.store(), self._key(rank)
        found = json.loads(store.get(key)) if store.check([key]) else (-1, 0)
        return found[1] if found[0] == epoch else None

    @staticmethod
    def _key(rank: int) -> str:
        return f"pass/{rank}"
