"""The fixture `node`: this process is a worker that can stay, and a thread has the node process's side."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest
from time_limits import LIMIT_SECONDS, scaled, wait_until

from lockstep.launch.node.worker_watch import StayingWorkers
from lockstep.world import NODE_PROCESS, MemberState, generations

T = TypeVar("T")


class Node:
    """A node process's side, in a thread. This process is its worker 7."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.workers = self.do(lambda: StayingWorkers(asyncio.Event()))
        asyncio.run_coroutine_threadsafe(self.workers.open(), self._loop).result(scaled(LIMIT_SECONDS))
        self.address = self.do(lambda: self.workers.address_for(7))

    def do(self, work: Callable[[], T]) -> T:
        """Do something in the loop."""

        async def body() -> T:
            return work()

        return asyncio.run_coroutine_threadsafe(body(), self._loop).result(scaled(LIMIT_SECONDS))

    def tell(self, **message: Any) -> None:
        self.do(lambda: self.workers.tell(message))

    def wait_until(self, is_true: Callable[[], bool]) -> None:
        wait_until(lambda: self.do(is_true))

    def stay(self, **named: Any) -> None:
        """Let this process stay, and wait until the node process has noticed."""
        generations.stay(**named)
        self.wait_until(lambda: self.workers.state(7) == MemberState.STAYS)

    def end(self) -> None:
        async def close() -> None:
            self.workers.close()
            while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)
            await asyncio.sleep(0)  # until the sockets are closed

        asyncio.run_coroutine_threadsafe(close(), self._loop).result(scaled(LIMIT_SECONDS))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    found = Node()
    monkeypatch.setenv(NODE_PROCESS, found.address)
    monkeypatch.setattr(generations, "_line", None)
    monkeypatch.setenv("RANK", "9")  # which `join_next` replaces
    monkeypatch.delenv("LOCKSTEP_PROGRESS", raising=False)
    yield found
    found.end()
    if line := generations._line:
        wait_until(lambda: line.is_closed)
