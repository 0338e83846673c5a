"""Workers for benchmarks that are forked from this process: they start in no time and hand back what they measured.

Each is kept on one core, worker by worker in turn: where the threads of a worker wake each other across the cores of a
virtual machine, a message takes up to ten times as long, and never twice the same.
"""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from lockstep.hvd.engine.channel import Channel
from lockstep.hvd.engine.connections import Links
from lockstep.hvd.engine.control import Control
from lockstep.hvd.engine.process_groups import gloo_group
from lockstep.hvd.engine.request import Request
from lockstep.hvd.engine.settings import Settings
from lockstep.hvd.engine.timeline import Timeline
from lockstep.world.store import serve_store

TIMEOUT_SECONDS = 120.0
Clocks = dict[str, float]


def in_forks(size: int, work: Callable[[int, dist.Store], Any]) -> list[Any]:
    """Call `work(rank, store)` in `size` processes with one thread each; their results by rank."""
    torch.set_num_threads(1)  # a pool of threads would not survive the fork
    served, port = serve_store()
    context = multiprocessing.get_context("fork")
    all_forked = context.Event()  # the store's threads hold locks while they answer, which a fork would copy for ever
    pipes = []
    for rank in range(size):
        receiver, sender = context.Pipe(duplex=False)
        child = context.Process(target=_work, args=(rank, port, all_forked, sender, work))
        child.start()
        sender.close()
        pipes.append((receiver, child))
    all_forked.set()
    try:
        replies = [pipe.recv() if pipe.poll(TIMEOUT_SECONDS) else (False, "no answer") for pipe, _ in pipes]
    except EOFError:
        replies = [(False, "a forked worker ended without an answer")]
    for _, child in pipes:
        child.join(TIMEOUT_SECONDS)
    del served
    for good, reply in replies:
        if not good:
            raise RuntimeError(f"a forked worker failed: {reply}")
    return [reply for _, reply in replies]


def _work(rank: int, port: int, all_forked: Any, sender: Any, work: Callable[[int, dist.Store], Any]) -> None:
    all_forked.wait()
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    try:
        sender.send((True, work(rank, dist.TCPStore("127.0.0.1", port, is_master=False))))
    except BaseException:
        sender.send((False, traceback.format_exc()))
    os._exit(0)


def agreement_rounds(size: int, names: int, rounds: int, turns: int) -> list[Clocks]:
    """Rounds of the real engine over the real sockets, of `names` barriers each and no tensors.

    Returns, of each of `turns` turns, the seconds a round by the wall clock, and the processor time of all workers.
    """

    def work(rank: int, store: dist.Store) -> list[Clocks]:
        group = gloo_group(dist.PrefixStore("set", store), rank, size, 30, one_host=True)
        links = Links(None, store, rank, size)
        channel = Channel(range(size), Control(group, rank, size), links, Settings(), Timeline(), lambda: None)
        measured = []
        for _ in range(1 + turns):
            began, cpu = time.perf_counter(), time.process_time()
            for _ in range(rounds):
                requests = [channel.submit(make()) for make in barriers(names)]
                if names > 1:
                    channel.hurry()
                for request in requests:
                    request.wait()
            ended = time.perf_counter()
            measured.append({"wall": (ended - began) / rounds, "cpu": (time.process_time() - cpu) / rounds})
        channel.close("measured")
        channel.wait_for_end(5)
        return measured[1:]

    by_rank = in_forks(size, work)
    return [
        {"wall": max(turn["wall"] for turn in at), "cpu": sum(turn["cpu"] for turn in at)}
        for at in zip(*by_rank, strict=True)
    ]


def barriers(names: int, first: int = 0) -> list[Callable[[], Request]]:
    """Requests that need agreement and nothing else, from the `first` name on; a single one is not held back."""

    def barrier(number: int) -> Callable[[], Request]:
        return lambda: Request("barrier", f"layer{number}.weight", [], urgent=names == 1)

    return [barrier((first + number) % names) for number in range(names)]
