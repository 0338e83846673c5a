"""What a message between two workers costs on this machine, measured over the sockets that the engine itself uses.

A Gloo message is sent by the caller's thread, read at the other end by Gloo's own thread, and then wakes who waits for
it. Two processes pass messages of several sizes to and fro; each part's processor time is read from the threads'
clocks, and what then lacks to the time of a message is waiting: for the wire and for threads to wake up.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from forked_workers import in_forks

from lockstep.hvd.engine.channel import Bell
from lockstep.hvd.engine.process_groups import gloo_group
from lockstep.hvd.engine.settings import NO_TIMEOUT

SIZES = (16, 256, 2048, 16 << 10, 128 << 10, 1 << 20, 4 << 20)
SMALL_BYTES = 16 << 10  # of a larger message the parts overlap
BURST = 64  # messages
BURST_SECONDS = 0.05  # in which all of them arrive
TAG = 7
Turn = dict[str, float]  # seconds a message, by part


@dataclass(frozen=True)
class Line:
    """Seconds for a message: a fixed part and one a byte."""

    fixed: float
    per_byte: float = 0.0

    def __call__(self, size_bytes: int) -> float:
        return self.fixed + self.per_byte * size_bytes


@dataclass(frozen=True)
class MessageCosts:
    """Seconds that the parts of a message take.

    Args:
        send: Of the sender's processor, in the call.
        receive: Of the receiver's, to say where the message is to go.
        handle: Of the thread that reads the socket, and in `finish` of the one that waited.
        handle_more: Of the former for a message that comes while it still reads another.
        finish_ready: Of the latter for a message that is there when it asks.
        wake: Until a message's arrival has woken the thread that reads the socket and then the one that waits for it,
            on top of the processor time.
        thread_wake: From one thread's ring of the bell to the other's going on, within a process, on one core.
    """

    send: Line
    receive: Line
    handle: Line
    finish: Line
    handle_more: Line
    finish_ready: Line
    wake: float
    thread_wake: float

    def record(self) -> dict[str, Any]:
        return asdict(self)


def fit_line(sizes: Sequence[int], seconds: Sequence[float]) -> Line:
    """Least squares of relative errors, neither part below 0."""
    weights = 1 / np.maximum(np.asarray(seconds), 1e-7)
    columns = np.stack([np.ones(len(sizes)), np.asarray(sizes, float)], 1) * weights[:, None]
    target = np.asarray(seconds) * weights
    fixed, per_byte = np.linalg.lstsq(columns, target, rcond=None)[0].tolist()
    if per_byte < 0:
        return Line(float(np.mean(seconds)))
    return Line(max(0.0, fixed), per_byte)


def calibrate(repeats: int = 15, sizes: Sequence[int] = SIZES) -> MessageCosts:
    """Measure on this machine, in `repeats` turns over all sizes: some ten seconds."""

    def work(
        rank: int, store: dist.Store
    ) -> tuple[dict[int, list[dict[str, float]]], list[tuple[float, float]], float]:
        group = gloo_group(dist.PrefixStore("costs", store), rank, 2, 30, one_host=True)
        measured: dict[int, list[Turn]] = {size: [] for size in sizes}
        bursts = []
        for repeat in range(-1, repeats):
            for size in sizes:
                turn = _turn(group, rank, size, max(4, min(200, (4 << 20) // size)))
                if repeat >= 0:
                    measured[size].append(turn)
            bursts.append(_burst(group, rank))
        return measured, bursts, _thread_wake()

    (measured, _, thread_wake), (_, bursts, _) = in_forks(2, work)
    parts = {name: [median(turn[name] for turn in measured[size]) for size in sizes] for name in measured[sizes[0]][0]}
    send, receive, handle, finish = (fit_line(sizes, parts[name]) for name in ("send", "receive", "handle", "finish"))
    idle = [
        turn["way"] - turn["send"] - turn["handle"] - turn["finish"]
        for size in sizes
        for turn in measured[size]
        if size <= SMALL_BYTES
    ]
    more, ready = (Line(median(column)) for column in zip(*bursts, strict=True))
    more = Line(min(more.fixed, handle.fixed), handle.per_byte)
    return MessageCosts(send, receive, handle, finish, more, ready, max(0.0, median(idle)), thread_wake)


def _turn(group: Any, rank: int, size: int, times: int) -> Turn:
    """Seconds a message: its way from one worker to the other, and the processor time of its parts."""
    outgoing, incoming = torch.zeros(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    peer = 1 - rank
    spent = {"send": 0.0, "receive": 0.0, "finish": 0.0}

    def timed(name: str, call: Callable[[], Any]) -> Any:
        began = time.thread_time()
        value = call()
        spent[name] += time.thread_time() - began
        return value

    def bare(name: str, call: Callable[[], Any]) -> Any:
        return call()

    def send(clock: Any) -> Any:
        return clock("send", lambda: group.send([outgoing], peer, TAG))

    def receive(clock: Any) -> None:
        work = clock("receive", lambda: group.recv([incoming], peer, TAG))
        clock("finish", lambda: work.wait(NO_TIMEOUT))

    def passes(clock: Any) -> None:
        for _ in range(times):
            if rank == 0:
                sending = send(clock)
                receive(clock)
            else:
                receive(clock)
                sending = send(clock)
            sending.wait(NO_TIMEOUT)

    began, process, thread = time.perf_counter(), time.process_time(), time.thread_time()
    passes(bare)
    way = (time.perf_counter() - began) / times / 2
    others = (time.process_time() - process) - (time.thread_time() - thread)
    passes(timed)
    clock = _clock_seconds()
    parts = {name: max(0.0, seconds / times - clock) for name, seconds in spent.items()}
    return {**parts, "way": way, "handle": max(0.0, others / times)}


def _burst(group: Any, rank: int) -> tuple[float, float]:
    """Processor seconds a small message, of reading and of asking for it, where many come at once from rank 0."""
    blocks = torch.zeros(BURST, 16, dtype=torch.uint8)
    go = torch.zeros(1, dtype=torch.uint8)
    if rank == 0:
        group.recv([go], 1, TAG).wait(NO_TIMEOUT)
        for work in [group.send([block], 1, TAG) for block in blocks]:
            work.wait(NO_TIMEOUT)
        return 0.0, 0.0
    receiving = [group.recv([block], 0, TAG) for block in blocks]
    sending = group.send([go], 0, TAG)
    others = time.process_time() - time.thread_time()
    time.sleep(BURST_SECONDS)
    others = time.process_time() - time.thread_time() - others
    began = time.thread_time()
    for work in receiving:
        work.wait(NO_TIMEOUT)
    asking = time.thread_time() - began
    sending.wait(NO_TIMEOUT)
    return others / BURST, asking / BURST


def _clock_seconds() -> float:
    began = time.thread_time()
    for _ in range(100):
        time.thread_time()
    return (time.thread_time() - began) / 100


def _thread_wake(times: int = 500) -> float:
    """From ringing the bell until the other thread, which slept, has gone on."""
    there, back = Bell(), Bell()

    def answer() -> None:
        for _ in range(times):
            there.wait()
            back.ring()

    thread = threading.Thread(target=answer)
    thread.start()
    ways = []
    for _ in range(times):
        began = time.perf_counter()
        there.ring()
        back.wait()
        ways.append((time.perf_counter() - began) / 2)
    thread.join()
    return median(ways)
