"""The simulation of benchmarks/agreement runs the real engine, and counts what things cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import horovod_design
import pytest
import torch
from message_costs import Line, MessageCosts
from simulated_workers import SimulatedJob
from virtual_time import Network, Receive, Send, Spent, seconds_of

from lockstep.hvd.engine import control
from lockstep.hvd.engine.reduction import SUM
from lockstep.hvd.engine.request import Request

DTYPES = (torch.float32, torch.float64, torch.int64)
NOTHING = Line(0.0)
COSTS = MessageCosts(Line(1.0), NOTHING, Line(10.0), NOTHING, Line(10.0), NOTHING, 0.0, 0.0)
ONE_HOST = Network()
WORKERS = 8
STEPS = 3  # of Bruck's all-gather among 8
STEP = 1.0 + 10.0  # the sender's part and the reader's
OWN = 9.0  # at most, of Python here, for all that the engine computes in a round; what else there is takes longer


@pytest.fixture
def new_job() -> Iterator[Callable[..., SimulatedJob]]:
    jobs = []

    def new(network: Network = ONE_HOST, size: int = WORKERS) -> SimulatedJob:
        jobs.append(SimulatedJob(size, COSTS, network))
        return jobs[-1]

    yield new
    for job in jobs:
        job.close()


def barrier(rank: int) -> list[Callable[[], Request]]:
    return [lambda: Request("barrier", "x", [], urgent=True)]


class Told(Request):
    """An all-reduce that says when it has come to its end."""

    def __init__(self, number: int, rank: int, order: list[str]) -> None:
        tensor = torch.tensor([rank], dtype=DTYPES[number])  # of several dtypes, which are not fused
        super().__init__("allreduce", f"layer{number}", [tensor], operation=SUM)
        self.order = order

    def finish(self, result: object = None, error: str | None = None) -> None:
        self.order.append(self.name)
        super().finish(result, error)


@pytest.mark.parametrize("gathered", [1, WORKERS])
def test_the_real_engine_settles_one_order_and_reduces(
    new_job: Callable[..., SimulatedJob], gathered: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "GATHERED_WORKERS", gathered)
    job = new_job()
    orders: list[list[str]] = [[] for _ in range(WORKERS)]

    def requests(rank: int) -> list[Callable[[], Request]]:
        return [partial(Told, (rank + number) % 3, rank, orders[rank]) for number in range(3)]  # three orders

    job.rounds(1, requests, hurry=True)
    assert orders == [[f"allreduce.layer{number}" for number in range(3)]] * WORKERS
    for worker in job.workers:
        assert [request.result.item() for request in worker.requests] == [28] * 3


def test_a_round_costs_its_messages_one_after_the_other(new_job: Callable[..., SimulatedJob]) -> None:
    job = new_job()
    (end,) = job.rounds(1, barrier)
    assert STEPS * STEP <= end < STEPS * STEP + OWN
    assert job.simulation.messages == STEPS * WORKERS


def test_a_late_worker_delays_the_round(new_job: Callable[..., SimulatedJob]) -> None:
    job = new_job()
    (end,) = job.rounds(1, barrier, late=lambda rank: 500.0 if rank == 5 else 0.0)
    assert 500.0 + STEP <= end < 500.0 + STEPS * STEP + OWN


def test_among_many_that_say_the_same_no_message_grows(
    new_job: Callable[..., SimulatedJob], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "GATHERED_WORKERS", 1)
    job = new_job()
    names = [partial(Request, "barrier", f"layer{number}", []) for number in range(200)]
    job.rounds(2, lambda rank: names, hurry=True)
    assert job.simulation.bytes_sent == 2 * STEPS * WORKERS * control.SURVEY.size


def test_workers_that_share_a_core_wait_for_it(new_job: Callable[..., SimulatedJob]) -> None:
    job = new_job(Network(cores=1))
    (end,) = job.rounds(1, barrier)
    assert end >= STEPS * WORKERS * STEP


def test_latency_and_bandwidth_of_the_network_count() -> None:
    def there(rank: int) -> Iterator[Send | Receive | Spent]:
        if rank == 0:
            yield Send(1, 1000)
            yield Send(1, 1000)
        else:
            yield Receive(0)
            yield Receive(0)

    network = Network(latency=100.0, per_byte=0.01)
    # The second message leaves when the first has gone, and is read on its own.
    patterns = [there(0), there(1)]
    assert seconds_of(patterns, COSTS, network) == pytest.approx(1.0 + 20.0 + 100.0 + 10.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [2, 8, 64])
def test_horovods_patterns_come_to_their_end(size: int) -> None:
    steps = size.bit_length() - 1
    cached = horovod_design.exchange_seconds(horovod_design.cached, size, 100, COSTS, Network())
    assert cached == pytest.approx(steps * STEP)
    first = horovod_design.exchange_seconds(horovod_design.uncached, size, 100, COSTS, Network())
    assert first >= cached + (size - 1) * 10.0  # rank 0 reads each worker's requests
