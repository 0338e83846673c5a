"""Which rank is responsible for a hang, and what it is doing: from the states of all workers at one moment."""

from __future__ import annotations

import linecache
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from lockstep.diagnosis.board import HVD, JOINING, TRAINER
from lockstep.diagnosis.flight_recorder import RecordedCollective
from lockstep.diagnosis.inspection import STOPPED_STATES, Frame, WorkerState
from lockstep.files.untrusted import printable_name

MAX_STACKS = 3
MAX_FRAMES = 12
C10D = "torch/distributed/distributed_c10d.py"
LOADING = ("torch/utils/data/", "lockstep/data/", "multiprocessing/queues.py", "multiprocessing/connection.py")
COMPILING = ("torch/_inductor/", "torch/_dynamo/")
STARTING = ("lockstep/launch/forking/", "<string>", "<frozen runpy>")
LOCKING = ("acquire", "wait", "join", "__enter__", "_wait_for_tstate_lock")
LOCK_CALL = re.compile(r"(\.acquire\([^()]*\)|^\s*with [\w.]*lock):?\s*(#.*)?$", re.IGNORECASE)


@dataclass(frozen=True)
class Explanation:
    """The explanation of a hang.

    Args:
        culprits: The ranks that the others wait for; all ranks if these cannot be identified.
        lines: The explanation, the most important line first.
        stacks: Further lines: the culprits' stacks.
        ends_training: The culprits run Lockstep's training, and hang in a part of a step or of an evaluation. Trackers,
            callbacks and checkpoints may wait for a server or a file system for any time.
    """

    culprits: tuple[int, ...]
    lines: tuple[str, ...]
    stacks: tuple[str, ...]
    ends_training: bool = False

    def printed(self, *notes: str) -> list[str]:
        """Return the lines to print, with notes before the stacks."""
        return [*(f"lockstep: {line}" for line in (*self.lines, *notes)), *self.stacks]


@dataclass(frozen=True)
class Wait:
    """What a rank waits in: the same `key` on ranks that wait for each other."""

    key: tuple[object, ...]
    text: str


def explain(
    states: Sequence[WorkerState], idle_s: float, host_of: Callable[[int], str] = lambda rank: ""
) -> Explanation:
    """Explain why workers do not make progress.

    Args:
        states: One for each rank that is known, by rank.
        idle_s: For how long no rank has made progress.
        host_of: The host of a rank, or "" in a job on one host.
    """
    waits = _waits(states)
    absent = [state for state in states if state.rank not in waits]
    by_rank = {state.rank: state for state in states}
    if absent and waits:
        culprits = [state.rank for state in absent]
        lines = _absent(absent, waits, idle_s, host_of)
    elif waits:
        culprits, lines = _different(waits, by_rank, idle_s)
    else:
        culprits = [state.rank for state in states]
        lines = [f"no rank waits in a collective, and none has made progress for {idle_s:.0f} s"]
        lines += _doings(states, host_of)
    shown = [by_rank[rank] for rank in culprits][:MAX_STACKS]
    stacks = [line for state in shown for line in _stack_lines(state)]
    ends = any(state.flags & TRAINER for state in states) and all(_cannot_go_on(by_rank[rank]) for rank in culprits)
    # The names of files, functions and operations are the program's, and may have control characters.
    return Explanation(tuple(culprits), tuple(map(printable_name, lines)), tuple(map(printable_name, stacks)), ends)


@dataclass(frozen=True)
class Group:
    """Ranks that do the same.

    Args:
        doing: Their step, phase and collective, or their state.
        stack: The frames of the first one, innermost first, without those of the launcher.
    """

    ranks: tuple[int, ...]
    doing: str
    stack: tuple[Frame, ...]


def grouped(states: Sequence[WorkerState]) -> list[Group]:
    """Return the ranks in groups with equal stacks and collectives, in the order of the first ranks."""
    waits = _waits(states)
    groups: dict[tuple[str, tuple[Frame, ...]], list[int]] = {}
    for state in states:
        wait = waits.get(state.rank)
        at_step = f"step {state.step:,} · " if state.step >= 0 else ""
        doing = f"in {wait.text}" if wait else _doing(state).removeprefix("is ")
        groups.setdefault((f"{at_step}{doing}", _own_frames(state.stack)), []).append(state.rank)
    return [Group(tuple(ranks), doing, stack) for (doing, stack), ranks in groups.items()]


def ranks_text(ranks: Iterable[int]) -> str:
    """Return ranks in words: "rank 3", "ranks 0-2 and 4"."""
    ordered = sorted(ranks)
    parts: list[str] = []
    for _, group in groupby(enumerate(ordered), key=lambda pair: pair[1] - pair[0]):
        run = [rank for _, rank in group]
        parts += [f"{run[0]}-{run[-1]}"] if len(run) > 2 else map(str, run)
    listed = f"{', '.join(parts[:-1])} and {parts[-1]}" if len(parts) > 1 else "".join(parts)
    return f"rank{'s' if len(ordered) > 1 else ''} {listed}"


def _cannot_go_on(state: WorkerState) -> bool:
    is_in_step = state.phase not in ("starting", "running", "callbacks", "checkpoint")
    return is_in_step or not state.pid or state.state in (*STOPPED_STATES, "Z", "")


def _waits(states: Sequence[WorkerState]) -> dict[int, Wait]:
    """Return what each rank waits in; ranks that are in no collective are left out."""
    waits = _hvd_waits(states)
    return waits | {state.rank: wait for state in states if state.rank not in waits and (wait := _wait(state))}


def _hvd_waits(states: Sequence[WorkerState]) -> dict[int, Wait]:
    """Return the hvd operation that each rank waits in.

    If any operation is missing on some ranks, a rank waits only in one of those that it has submitted itself: a rank
    that has submitted only operations that all ranks have may have stopped since. Otherwise, all operations count.
    """
    sets = {state.rank: state.operations for state in states if _may_wait(state) and state.flags & HVD}
    names = list(dict.fromkeys(name for operations in sets.values() for name in operations))
    missing = {name: [rank for rank, operations in sets.items() if name not in operations] for name in names}
    incomplete = sorted((name for name in names if missing[name]), key=lambda name: len(missing[name]))
    found = {}
    for rank, operations in sets.items():
        own = [name for name in (incomplete or names) if name in operations]
        if own:
            found[rank] = Wait(("hvd", own[0]), own[0])
    return found


def _may_wait(state: WorkerState) -> bool:
    return bool(state.pid) and state.state not in STOPPED_STATES and not state.is_debugged


def _wait(state: WorkerState) -> Wait | None:
    """Return what a worker waits in; None if it is not in a collective, or cannot be."""
    if not _may_wait(state):
        return None
    unfinished = [each for each in state.collectives if not each.is_finished]
    if unfinished:
        return _wait_of(unfinished[0])
    if state.flags & JOINING:
        return Wait(("group",), "the creation of a process group")
    inner = [frame for frame in state.stack if frame.file.endswith(C10D)]
    name = next((frame.function for frame in inner if _is_collective(frame.function)), "")
    if name and not state.collectives:
        return Wait(("stack", name), name)
    if state.flags & TRAINER and state.phase == "reduction":
        return Wait(("phase", "reduction"), "the reduction of the gradients")
    return Wait(("pending",), "a collective") if state.pending else None


def _wait_of(collective: RecordedCollective) -> Wait:
    shapes = f" of {collective.shapes}" if collective.shapes else ""
    name = collective.group.partition("/")[0]
    group = f" in group {name}" if name != "0" else ""
    text = f"{collective.name} #{collective.number}{shapes}{group}"
    return Wait((collective.group, collective.number, collective.name, collective.shapes), text)


def _is_collective(function: str) -> bool:
    return not function.startswith("_") and function not in ("wrapper", "wait", "init_process_group")


def _absent(
    absent: Sequence[WorkerState], waits: Mapping[int, Wait], idle_s: float, host_of: Callable[[int], str]
) -> list[str]:
    (wait, _), *_ = Counter(waits.values()).most_common(1)
    those = [state.rank for state in absent]
    where = f" (host {host_of(those[0])})" if len(those) == 1 and host_of(those[0]) else ""
    verb = "has" if len(those) == 1 else "have"
    others = f"{ranks_text(waits)} {'have' if len(waits) > 1 else 'has'} waited for it for {idle_s:.0f} s"
    return [f"{ranks_text(those)}{where} {verb} not entered {wait.text}; {others}", *_doings(absent, host_of)]


def _different(
    waits: Mapping[int, Wait], by_rank: Mapping[int, WorkerState], idle_s: float
) -> tuple[list[int], list[str]]:
    """All ranks wait: in different collectives, or in the same one."""
    groups: dict[Wait, list[int]] = {}
    for rank, wait in waits.items():
        groups.setdefault(wait, []).append(rank)
    if len(groups) == 1:
        (wait,) = groups
        return list(waits), [
            f"all ranks have been in {wait.text} for {idle_s:.0f} s: the network or a device does not respond",
        ]
    largest = max(map(len, groups.values()))
    minority = [rank for ranks in groups.values() if len(ranks) < largest for rank in ranks]
    culprits = sorted(minority or waits)
    shared = set.intersection(*(set(by_rank[ranks[0]].stack) for ranks in groups.values()))  # a wrapper, for example
    return culprits, [
        f"ranks have waited in different collectives for {idle_s:.0f} s:",
        *(f"{ranks_text(ranks)} in {wait.text}{_at(by_rank[ranks[0]], shared)}" for wait, ranks in groups.items()),
        "every rank must call the same collectives, with the same shapes, in the same order",
    ]


def _doings(states: Sequence[WorkerState], host_of: Callable[[int], str]) -> list[str]:
    """Return one line for each different situation of these ranks."""
    groups: dict[str, list[int]] = {}
    for state in states:
        groups.setdefault(_doing(state), []).append(state.rank)
    lines = []
    for doing, ranks in groups.items():
        plural = {"is": "are", "has": "have"} if len(ranks) > 1 else {}
        verb, _, rest = doing.partition(" ")
        lines.append(f"{ranks_text(ranks)} {plural.get(verb, verb)} {rest}")
    return lines


def _doing(state: WorkerState) -> str:
    """Describe what a worker is doing, as a predicate such as "is waiting for data"."""
    at = _at(state)
    if not state.pid and state.exit_code is None:
        return "is not responding: its process is stopped or frozen, or its host is unreachable"
    if not state.pid:
        return f"has exited with code {state.exit_code}: it finished before the other ranks"
    if state.state in STOPPED_STATES:
        return f"is stopped (process {state.pid}); kill -CONT {state.pid} continues it"
    if state.state in ("", "Z"):
        return f"is gone (process {state.pid})"
    if state.is_debugged:
        return f"is being debugged{at}"
    if state.state == "D":
        return f"is blocked in the kernel (process {state.pid}): a device or a file system does not respond{at}"
    if not state.has_answered:
        return f"is in native code that holds the GIL, or frozen{at}"
    files = [frame.file for frame in state.stack]
    if any(part in file for file in files for part in COMPILING):
        return f"is compiling the model{at}"
    if state.phase == "data_wait" or any(part in file for file in files for part in LOADING):
        return f"is waiting for data{at}"
    if state.stack and _waits_for_lock(state.stack[0], state.state):
        return f"is waiting for a lock{at}"
    phase = f"in {state.phase}" if state.flags & TRAINER and state.phase != "running" else "in user code"
    early = "" if state.flags else " before its import of torch"
    return f"is {phase}{early}{at}"


def _waits_for_lock(frame: Frame, state: str) -> bool:
    """Whether a worker waits for a lock. The methods of a plain lock are in C, without frames: then its line tells."""
    if frame.file.endswith("threading.py"):
        return frame.function in LOCKING
    return state == "S" and LOCK_CALL.search(linecache.getline(frame.file, frame.line)) is not None


def _at(state: WorkerState, shared: Set[Frame] = frozenset()) -> str:
    """Return where a worker is in the user's code, in a frame that others do not share if there is one."""
    users = [frame for frame in state.stack if frame.is_users]
    found = [*(frame for frame in users if frame not in shared), *users, *state.stack]
    return f", at {Path(found[0].file).name}:{found[0].line} in {found[0].function}" if found else ""


def _own_frames(stack: Sequence[Frame]) -> tuple[Frame, ...]:
    """Return a stack without the outermost frames, which start the program."""
    own = list(stack)
    while len(own) > 1 and any(part in own[-1].file for part in STARTING):
        own.pop()
    return tuple(own)


def describe_worker(state: WorkerState) -> str:
    """Return what a worker is doing, with its stack, in lines."""
    return "\n".join([f"rank {state.rank} {_doing(state)}", *_stack_lines(state)])


def _stack_lines(state: WorkerState) -> list[str]:
    if not state.stack:
        return []
    stack = _own_frames(state.stack)
    head = f"rank {state.rank}, process {state.pid}, most recent call first:"
    frames = [f'  File "{frame.file}", line {frame.line}, in {frame.function}' for frame in stack[:MAX_FRAMES]]
    more = len(stack) - MAX_FRAMES
    return [head, *frames, *([f"  ... and {more} more"] if more > 0 else [])]
