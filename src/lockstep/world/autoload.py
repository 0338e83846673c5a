"""The entry point that `import torch` calls in every program: nearly free outside jobs that Lockstep has launched."""

from __future__ import annotations

import os
import sys

from lockstep.diagnosis import FOLDER, MEASURE, OBSERVE


def attach() -> None:
    """Publish the progress of this program, and observe its steps, if it is a worker of a job that asks for it."""
    if os.environ.get(FOLDER):
        try:
            from lockstep.diagnosis import publisher

            publisher.attach_to_torch()
        except Exception as error:  # which would make `import torch` fail
            print(f"lockstep: this worker publishes no progress: {error!r}", file=sys.stderr)
    observe_if_asked()


def observe_if_asked() -> None:
    """Observe this program's steps from now on, if its launcher wants it."""
    # Removed from the environment: programs that this one starts are not observed.
    is_wanted, length, rank = os.environ.pop(OBSERVE, ""), os.environ.pop(MEASURE, ""), os.environ.get("RANK", "")
    if not (is_wanted or length) or not rank.isdecimal():
        return
    try:
        import multiprocessing

        from lockstep.diagnosis import publisher
        from lockstep.world.observer import Observer, observe

        if multiprocessing.parent_process():  # this is a loader process, for example
            return
        if length:
            from lockstep.world.measurement import Measurement

            warmup, steps, needs_samples = map(int, length.split(","))
            observe(Measurement(warmup, steps, bool(needs_samples)))
        elif board := publisher.own_board():
            observe(Observer(board))
    except Exception as error:  # which would make `import torch` fail
        print(f"lockstep: this worker is not observed: {error!r}", file=sys.stderr)
