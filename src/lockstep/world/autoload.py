"""The entry point that `import torch` calls in every program: nearly free in those that are not observed.

In jobs that Lockstep has launched, the launcher watches the workers. Under other launchers, LOCKSTEP_OBSERVE lets the
workers do so themselves, from their first process group on: they need its store to find each other. So do workers that
the only worker of a job starts.
"""

from __future__ import annotations

import atexit
import functools
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.diagnosis import CHECK, FOLDER, MEASURE, NOT_OBSERVED, OBSERVE, OBSERVE_STARTED, of_worker

if TYPE_CHECKING:
    from lockstep.diagnosis.board import Board
    from lockstep.observe.group_observation import GroupObservation
    from lockstep.world.observer import Observer

LONGEST_FOLDER = 107 - len("/listener-xxxxxxxx")  # of a Unix socket, whose path has at most 107 characters: man 7 unix


def attach() -> None:
    """Publish the progress of this program, and observe its steps, if it is a worker of a job that asks for it."""
    observes_groups = os.environ.get(OBSERVE, "") not in NOT_OBSERVED
    if os.environ.get(FOLDER):
        observes_groups = OBSERVE_STARTED in os.environ  # a worker has started this program
        try:
            from lockstep.diagnosis import publisher

            if not observes_groups:
                publisher.attach_to_torch()
            name_after_job()
        except Exception as error:  # which would make `import torch` fail
            print(f"lockstep: this worker publishes no progress: {error!r}", file=sys.stderr)
        observe_if_asked()
    if observes_groups:
        try:
            _observe_groups()
        except Exception as error:
            print(f"lockstep: this program is not observed: {error!r}", file=sys.stderr)


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
    # Removed from the environment: programs that this one starts are observed only if they are workers of a group.
    is_wanted, length, rank = os.environ.pop(OBSERVE, ""), os.environ.pop(MEASURE, ""), of_worker("RANK")
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

            warmup, steps, needs_samples, memory_limit, *change = length.split(",")
            if change:
                from lockstep.observe.outside_changes import apply

                apply(change[0])
            observe(Measurement(int(warmup), int(steps), needs_samples == "1", memory_limit))
        elif board := publisher.own_board():
            observe(own := Observer(board))
            if is_wanted != "1":  # a folder
                own.count_io()
            if of_worker("WORLD_SIZE") == "1":
                os.environ[OBSERVE_STARTED] = "1"
    except Exception as error:  # which would make `import torch` fail
        print(f"lockstep: this worker is not observed: {error!r}", file=sys.stderr)


def _observe_groups() -> None:
    """Observe this program in each job whose default process group it creates, and if it runs alone."""
    import multiprocessing

    from torch.distributed import HashStore, distributed_c10d

    from lockstep.diagnosis import flight_recorder, publisher
    from lockstep.world.launcher_environment import RankInfo

    os.environ.setdefault(*flight_recorder.VARIABLE)
    folder = os.environ.get(FOLDER)
    destroy, joined = distributed_c10d.destroy_process_group, [False]

    def begin(size: int, rank: int, ranks: list[int], backend: Any, store: Any, *_: Any, **__: Any) -> None:
        try:
            is_watched = os.environ.get(FOLDER) != folder  # by a launcher that has started this program since
            if not ranks and size > 1 and not is_watched:  # the default group
                joined[0] |= observation().join(store, rank, size)
        except Exception as error:
            print(f"lockstep: this program is not observed: {error!r}", file=sys.stderr)

    @functools.wraps(destroy)
    def leave_and_destroy(group: Any = None) -> None:
        if joined[0] and group in (None, distributed_c10d.GroupMember.WORLD):
            joined[0] = False
            observation().leave()  # while rank 0 serves the store
        destroy(group)

    publisher.before_groups(begin)
    for module in (distributed_c10d, sys.modules["torch.distributed"]):
        vars(module)["destroy_process_group"] = leave_and_destroy
    if not folder and not multiprocessing.parent_process() and RankInfo.from_environment().size == 1:
        observation().join(HashStore(), 0, 1)


@functools.cache
def observation() -> GroupObservation:
    """Return what observes this process under launchers that do not watch their workers."""
    from lockstep.observe.group_observation import GroupObservation
    from lockstep.world.peer_loss import end_process

    value = os.environ.get(OBSERVE, "")
    folder = Path(value).absolute() if value not in (*NOT_OBSERVED, "1") else None
    own = GroupObservation(_observed, end_process, folder)
    atexit.register(own.close)
    return own


def _observed(board: Board | None) -> Observer:
    """Observe this process's steps, from 0."""
    from lockstep.world import observer

    own = observer.current
    if own is None or own.is_off:  # of the parent process, for example
        own = observer.Observer(board)
        observer.observe(own)
    else:
        own.begin_generation(board)
    return own
