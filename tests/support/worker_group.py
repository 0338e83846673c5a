"""Real workers for tests: forked processes that connect through a store on loopback, like the launcher's workers."""

from __future__ import annotations

import functools
import gc
import inspect
import itertools
import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch._dynamo  # every optimizer imports it; importing it before the fork saves 4 s per worker
from time_limits import Limit, scaled

from lockstep import hvd
from lockstep.world.launcher_environment import RankInfo
from lockstep.world.rendezvous import serve_store
from lockstep.world.world import World, connect

TIMEOUT_SECONDS = 120
SETTLE_SECONDS = 5  # for a thread to exit after it was stopped


def run_in_workers(
    size: int, function: Callable[..., Any], *arguments: Any, settle_seconds: float = SETTLE_SECONDS
) -> list[Any]:
    """Call `function(world, *arguments)` in `size` connected workers; return their results by rank."""
    store, port = serve_store()
    context = multiprocessing.get_context("fork")
    all_forked = context.Event()  # no request before all forks: they would copy locks of the store's threads
    pipes, children = [], []
    for rank in range(size):
        receiver, sender = context.Pipe(duplex=False)
        own = (sender, all_forked, rank, size, port, function, arguments, settle_seconds)
        child = context.Process(target=_work, args=own)
        child.start()
        sender.close()
        pipes.append(receiver)
        children.append(child)
    all_forked.set()
    try:
        outcomes = [_receive(pipe) for pipe in pipes]
    finally:
        for child in children:
            child.join(10)
            if child.is_alive():
                child.kill()
                child.join()
    del store
    errors = [f"worker {rank}:\n{error}" for rank, (error, _) in enumerate(outcomes) if error]
    assert not errors, "\n".join(errors)
    return [result for _, result in outcomes]


def on_workers(*sizes: int, **tables: Iterable[Any]) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Run a test's body in every worker of a group of each size, and require the same return value of all workers.

    The body gets its fixtures and parameters, and may take `world`, `rank` and `size`. A failure names the rank.

    Args:
        sizes: Numbers of workers.
        tables: Arguments of the body by name, each with its values. The same workers run all combinations, since
            starting them costs more than most cases. A failure names the case.
    """

    def decorate(body: Callable[..., Any]) -> Callable[..., None]:
        signature = inspect.signature(body)
        given = [name for name in ("world", "rank", "size") if name in signature.parameters]
        cases = [dict(zip(tables, values, strict=True)) for values in itertools.product(*tables.values())]

        @functools.wraps(body)
        def test(**arguments: Any) -> None:
            def work(world: World) -> list[Any]:
                facts = {"world": world, "rank": world.rank, "size": world.size}
                own = arguments | {name: facts[name] for name in given}
                return [_run_case(body, own, case) for case in cases]

            for size in sizes:
                first, *others = run_in_workers(size, work)
                assert others == [first] * len(others)

        own = [parameter for name, parameter in signature.parameters.items() if name not in (*given, *tables)]
        vars(test)["__signature__"] = signature.replace(parameters=own)  # pytest's view of the test
        return test

    return decorate


def _run_case(body: Callable[..., Any], arguments: dict[str, Any], case: dict[str, Any]) -> Any:
    try:
        return body(**arguments, **case)
    except BaseException as error:
        error.add_note(f"case: {case}")
        raise


def on_hvd_workers(*sizes: int, **tables: Iterable[Any]) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Run a test's body as `on_workers` does, with hvd initialized before each case; hvd must still work after it."""

    def decorate(body: Callable[..., Any]) -> Callable[..., None]:
        @functools.wraps(body)
        def with_hvd(**arguments: Any) -> Any:
            hvd.init()
            result = body(**arguments)
            if hvd.is_initialized():
                assert hvd.allreduce(torch.ones(1), name="after the test", op=hvd.Sum).item() == hvd.size()
            hvd.shutdown()
            return result

        return on_workers(*sizes, **tables)(with_hvd)

    return decorate


def _receive(pipe: Any) -> tuple[str, Any]:
    limit = Limit(TIMEOUT_SECONDS)
    while not pipe.poll(min(1.0, limit.left())):
        if not limit.left():
            return f"no answer in {TIMEOUT_SECONDS} s", None
    try:
        return pipe.recv()
    except EOFError:
        return "ended without an answer", None


def _work(
    pipe: Any,
    all_forked: Any,
    rank: int,
    size: int,
    port: int,
    function: Callable[..., Any],
    arguments: Any,
    settle_seconds: float,
) -> None:
    gc.freeze()  # a collection would touch, and so copy, all pages shared with the parent: 0.2 s
    all_forked.wait()
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(size),
        GROUP_RANK="0",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        GLOO_SOCKET_IFNAME="lo",
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    torch.set_num_threads(1)
    try:
        with connect(RankInfo.from_environment(), "cpu") as world:
            result = function(world, *arguments)
        left = _left_behind(settle_seconds)
        pipe.send((f"{function.__name__} leaves behind: {', '.join(left)}" if left else "", result))
    except BaseException:
        pipe.send((traceback.format_exc(), None))
        os._exit(1)  # as a failed worker does; its peers must not wait for an orderly shutdown


def _left_behind(settle_seconds: float) -> list[str]:
    """Return what the work left in the process, such as threads; nothing if hvd stays initialized until the exit."""
    if hvd.is_initialized():
        return []
    ours = [
        thread for thread in threading.enumerate() if "lockstep" in thread.name or _is_ours(vars(thread).get("_target"))
    ]
    left = [f"the thread {thread.name}" for thread in ours if not _ends(thread, settle_seconds)]
    left += [f"a handler of {number!r}" for number in signal.valid_signals() if _is_ours(signal.getsignal(number))]
    return left + ["a process group"] * torch.distributed.is_initialized()


def _is_ours(function: Any) -> bool:
    return str(getattr(function, "__module__", None)).startswith("lockstep.")


def _ends(thread: threading.Thread, seconds: float) -> bool:
    thread.join(scaled(seconds))
    return not thread.is_alive()
