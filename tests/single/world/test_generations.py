"""Both ends of the connection of a worker that stays: `lockstep.world.generations` and the node process's side."""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta

import pytest
import torch.distributed as dist
from staying_node import Node
from time_limits import LIMIT_SECONDS, wait_until

from lockstep.errors import LostPeerError, WorldError
from lockstep.world import NODE_PROCESS, MemberState, generations, peer_loss
from lockstep.world.generations import ADDED, REMOVED, HostsChangedError, Waits


@contextmanager
def joining(node: Node) -> Iterator[Future[None]]:
    """Yield a call of `join_next` in another thread, which waits."""
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(generations.join_next)
        node.wait_until(lambda: node.workers.state(7) == MemberState.WAITS)
        yield future


def test_worker_waits_and_gets_the_variables_of_its_next_rank(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    node.stay(must_lead=True)
    assert node.do(lambda: (node.workers.must_lead(7), node.workers.state(7), node.workers.state(8))) == (
        True,
        MemberState.STAYS,
        MemberState.ENDS,
    )
    for rank in ("0", "2"):
        with joining(node) as joined:
            assert not joined.done()
            node.do(lambda rank=rank: node.workers.answer(7, {"RANK": rank}))
            joined.result(LIMIT_SECONDS)
        assert os.environ["RANK"] == rank
        assert node.do(lambda: node.workers.state(7)) == MemberState.STAYS


def test_worker_that_is_not_needed_exits_with_success(node: Node) -> None:
    node.stay()
    with joining(node) as joined:
        node.do(lambda: node.workers.answer(7, {}))
        with pytest.raises(SystemExit) as exited:
            joined.result(LIMIT_SECONDS)
        assert exited.value.code == 0


def test_changes_count_until_a_generation_includes_them(node: Node) -> None:
    node.stay()
    for change in (ADDED, REMOVED):
        node.tell(change=change)
    wait_until(lambda: generations.host_changes(0) == (2, ADDED | REMOVED))
    assert generations.host_changes(1) == (2, REMOVED)
    assert generations.host_changes(2) == (2, 0)
    with joining(node) as joined:
        node.do(lambda: node.workers.answer(7, {"RANK": "0"}))
        joined.result(LIMIT_SECONDS)
    assert generations.host_changes(0) == (2, 0)


def test_workers_that_introduce_themselves_late_hear_of_changes(node: Node) -> None:
    node.tell(change=ADDED)
    node.stay()
    wait_until(lambda: generations.host_changes(0) == (1, ADDED))


def test_store_of_a_lost_generation_is_not_waited_for(node: Node) -> None:
    """It has exited, and torch would try to reach it for minutes."""
    node.stay()
    node.tell(over=True)
    assert generations.is_over(LIMIT_SECONDS)
    with (
        pytest.raises(WorldError, match="another worker disconnected before this one had connected"),
        generations.Connections().connecting(),
    ):
        pytest.fail("it connects")


def test_loss_interrupts_a_worker_that_connects() -> None:
    ours, theirs = socket.socketpair()  # opened before
    with ours, theirs, socket.create_server(("127.0.0.1", 0)) as server:
        with generations.Connections().connecting():
            pass
        connections = generations.Connections()
        with (
            connections.connecting(),
            ThreadPoolExecutor(1) as pool,
            socket.create_connection(server.getsockname()) as store,
        ):
            reading = pool.submit(store.recv, 1)
            connections.shut_down()
            assert reading.result(LIMIT_SECONDS) == b""
        theirs.sendall(b"a")
        connections.shut_down()
        assert ours.recv(1) == b"a"


def test_end_of_a_generation_ends_its_collectives(node: Node) -> None:
    ended = threading.Event()
    node.stay(end_collectives=ended.set, limits=Waits(patience=0.05))
    generations.check()
    assert not generations.is_over(0.0)
    node.tell(over=True)
    assert generations.is_over(LIMIT_SECONDS)
    assert ended.wait(LIMIT_SECONDS)
    with pytest.raises(LostPeerError, match="start again without"):
        generations.check()
    with joining(node) as joined:
        node.tell(over=True)  # of the one that it has left
        node.do(lambda: node.workers.answer(7, {"RANK": "0"}))
        joined.result(LIMIT_SECONDS)
    assert not generations.is_over(0.0)


@pytest.mark.parametrize(
    ("file", "is_busy", "exits"),
    [
        ("/site-packages/torch/autograd/graph.py", False, True),
        ("/site-packages/torch/distributed/distributed_c10d.py", False, True),
        ("/site-packages/torch/autograd/graph.py", True, False),  # a backward pass that takes long
        ("/site-packages/torch/distributed/checkpoint/filesystem.py", False, False),  # a slow disk
    ],
)
def test_only_a_worker_that_hangs_in_a_collective_exits(
    node: Node, monkeypatch: pytest.MonkeyPatch, file: str, is_busy: bool, exits: bool
) -> None:
    lock, errors, ended = threading.Lock(), list[Exception](), threading.Event()
    monkeypatch.setattr(peer_loss, "end_process", lambda error: (errors.append(error), lock.release()))
    limits = Waits(patience=0.2, hung=0.5, hung_cpu=-1.0 if is_busy else LIMIT_SECONDS)
    node.stay(end_collectives=ended.set, limits=limits)
    lock.acquire()

    def end() -> None:
        main = threading.main_thread().ident or 0
        wait_until(lambda: sys._current_frames()[main].f_code.co_filename == file)
        node.tell(over=True)
        if not exits:
            assert ended.wait(LIMIT_SECONDS)
            threading.Timer(1.0, lock.release).start()

    thread = threading.Thread(target=end)
    thread.start()
    exec(compile("lock.acquire()", file, "exec"), {"lock": lock})
    thread.join()
    assert ended.is_set()
    assert [type(each) for each in errors] == [LostPeerError] * exits


@pytest.mark.parametrize(("text", "is_ours"), [("Connection closed by peer", True), ("a bug", False)])
def test_late_news_still_explain_a_disconnected_peer(node: Node, text: str, is_ours: bool) -> None:
    node.stay(limits=Waits(news=0.05, loss_news=LIMIT_SECONDS))
    with ThreadPoolExecutor(1) as pool:
        verdict = pool.submit(generations.is_interruption, RuntimeError(text))
        if is_ours:
            node.wait_until(lambda: node.workers.has_lost_peer)
        else:
            verdict.result(LIMIT_SECONDS)
            assert not node.do(lambda: node.workers.has_lost_peer)
        node.tell(over=True)
        assert verdict.result(LIMIT_SECONDS) == is_ours


def test_without_a_node_process_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(NODE_PROCESS, raising=False)
    generations.stay()
    generations.check()
    assert not generations.is_over()
    assert generations.host_changes(0) == (0, 0)
    with pytest.raises(WorldError, match="no launcher of Lockstep watches it"):
        generations.join_next()


def test_lost_node_process_is_an_error(node: Node) -> None:
    node.stay()
    with joining(node) as joined:
        node.do(lambda: [line.writer.close() for line in node.workers._lines.values()])
        with pytest.raises(WorldError, match="the node process on this host"):
            joined.result(LIMIT_SECONDS)


def test_only_the_first_process_of_a_worker_stays(node: Node) -> None:
    node.stay()
    host, port, secret, number = node.address.split(":")
    with socket.create_connection((host, int(port)), LIMIT_SECONDS) as child:
        child.sendall(f'{{"secret": "{secret}", "worker": {number}, "must_lead": true}}\n'.encode())
        assert child.recv(1) == b""
    assert node.do(lambda: (node.workers.state(7), node.workers.must_lead(7))) == (MemberState.STAYS, False)
    assert not node.workers.have_state


HELLO = '{"secret": "%s", "worker": 7, "must_lead": false}\n'
STRANGERS = ["\n", "{}\n", "[]\n", HELLO % "wrong", '{"secret": null, "worker": 7}\n', "x" * 100_000, "\xff\n"]


@pytest.mark.parametrize("text", STRANGERS)
def test_strangers_are_turned_away(node: Node, text: str) -> None:
    host, port, *_ = node.address.split(":")
    with socket.create_connection((host, int(port)), LIMIT_SECONDS) as stranger:
        stranger.sendall(text.encode("latin-1"))
        stranger.shutdown(socket.SHUT_WR)
        with suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
    assert node.do(lambda: node.workers.state(7)) == MemberState.ENDS
    node.stay()


def test_interrupted_connecting_does_not_rename_the_next_group() -> None:
    def interrupted() -> None:
        with pytest.raises(RuntimeError):
            dist.init_process_group(
                "gloo", store=dist.HashStore(), rank=0, world_size=2, timeout=timedelta(milliseconds=10)
            )
        raise HostsChangedError

    with pytest.raises(WorldError, match="no launcher"):  # of Lockstep watches this process
        generations.survive(interrupted)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert dist.group.WORLD.group_name == "0"
    finally:
        dist.destroy_process_group()
