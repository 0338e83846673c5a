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
    folder, length, rank = os.environ.pop(OBSERVE, ""), os.environ.pop(MEASURE, ""), os.environ.get("RANK", "")
    if not (folder or length) or not rank.isdecimal():
        return
    try:
        import multiprocessing
        from pathlib import Path

        from lockstep.diagnosis.observed_steps import record_file
        from lockstep.world.measurement import Measurement
        from lockstep.world.observer import Observer, observe

        if multiprocessing.parent_process():  # this is a loader process, for example
            return
        if length:
            observe(Measurement(*map(int, length.split(","))))
        else:
            Path(folder).mkdir(parents=True, exist_ok=True)
            observe(Observer(record_file(Path(folder), rank)))
    except Exception as error:  # which would make `import torch` fail
        print(f"lockstep: this worker is not observed: {error!r}", file=sys.stderr)
