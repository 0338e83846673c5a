"""The entry point that `import torch` calls in every program: nearly free outside jobs that Lockstep has launched."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from lockstep.diagnosis import CHECK, FOLDER, MEASURE, OBSERVE

LONGEST_FOLDER = 107 - len("/listener-xxxxxxxx")  # of a Unix socket, whose path has at most 107 characters: man 7 unix


def attach() -> None:
    """Publish the progress of this program, and observe its steps, if it is a worker of a job that asks for it."""
    if os.environ.get(FOLDER):
        try:
            from lockstep.diagnosis import publisher

            publisher.attach_to_torch()
            name_after_job()
        except Exception as error:  # which would make `import torch` fail
            print(f"lockstep: this worker publishes no progress: {error!r}", file=sys.stderr)
    observe_if_asked()


def name_after_job() -> None:
    """Let the job remove what multiprocessing leaves behind if this worker is killed: sockets and named semaphores.

    Processes inherit these settings from their parents; they have no public names.
    """
    import multiprocessing

    folder, settings = os.environ.get(FOLDER), getattr(multiprocessing.current_process(), "_config", None)
    if folder and settings and sys.platform == "linux" and not multiprocessing.parent_process():
        settings["semprefix"] = f"/{Path(folder).parent.name}"
        if len(os.fsencode(folder)) <= LONGEST_FOLDER:
            settings.setdefault("tempdir", folder)


def observe_if_asked(is_worker: bool = False) -> None:
    """Observe this program's steps from now on, if its launcher wants it; loader processes are not workers."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") and "HOROVOD_RANK" in os.environ and not is_worker:
        from lockstep.diagnosis.spawned_workers import allow_groups

        allow_groups(lambda: observe_if_asked(is_worker=True))
    # Removed from the environment: programs that this one starts are not observed.
    is_wanted, length, rank = os.environ.pop(OBSERVE, ""), os.environ.pop(MEASURE, ""), os.environ.get("RANK", "")
    checked = os.environ.pop(CHECK, "")
    if not (is_wanted or length or checked) or not rank.isdecimal():
        return
    try:
        import multiprocessing

        from lockstep.diagnosis import publisher
        from lockstep.world.observer import Observer, observe

        if multiprocessing.parent_process() and not is_worker:  # this is a loader process, for example
            return
        if checked:
            from lockstep.script_check.hooks import record_for_launcher

            record_for_launcher(int(rank), checked)
        elif length:
            from lockstep.world.measurement import Measurement

            warmup, steps, needs_samples, memory_limit = length.split(",")
            observe(Measurement(int(warmup), int(steps), needs_samples == "1", memory_limit))
        elif board := publisher.own_board():
            observe(Observer(board))
    except Exception as error:  # which would make `import torch` fail
        print(f"lockstep: this worker is not observed: {error!r}", file=sys.stderr)
