"""The messages of Horovod's published design for one cycle of coordination, as patterns for `virtual_time`.

From Horovod's sources (0.28.1: controller.cc, response_cache.cc, mpi_controller.cc, gloo_controller.cc) and its
documentation: every cycle (HOROVOD_CYCLE_TIME, 1 ms) the workers all-reduce a bit vector, of a bit for each cached
response and four for states. Where every pending tensor is cached that is all. Otherwise rank 0 gathers the lengths of
the workers' requests and then the requests, and broadcasts the length of its response and then the response. With MPI,
the libraries' usual algorithms for short messages: recursive doubling for the all-reduce, binomial trees for gather
and broadcast, and a root that receives from each for gatherv. With Gloo, whose all-reduce is a ring: 2(N - 1) steps.

The messages cost what Lockstep's own cost; what Horovod computes between them, in C++, is taken to cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable

from message_costs import MessageCosts
from virtual_time import Network, Pattern, Receive, Send, Spent, seconds_of

CYCLE_SECONDS = 0.001
STATE_BITS = 4
REQUEST_BYTES = 100  # of a serialised request or response, by a name of some 40 letters; taken, not measured
RING_WORKERS = 8  # that stand for a ring of any length, whose steps are all alike


def vector_bytes(names: int) -> int:
    """Of the bit vector: whole words of 64 bits."""
    return -(-(names + STATE_BITS) // 64) * 8


def recursive_doubling(rank: int, size: int, size_bytes: int) -> Pattern:
    """All-reduce in log2(size) exchanges; `size` is a power of two."""
    distance = 1
    while distance < size:
        yield Send(rank ^ distance, size_bytes)
        yield Receive(rank ^ distance)
        distance *= 2


def gather_lengths(rank: int, size: int) -> Pattern:
    """Binomial tree to rank 0, of 4 bytes a worker."""
    distance = 1
    while distance < size:
        if rank & distance:
            yield Send(rank - distance, 4 * distance)
            return
        yield Receive(rank + distance)
        distance *= 2


def gather_requests(rank: int, size: int, size_bytes: int) -> Pattern:
    """Rank 0 receives from each."""
    if rank:
        yield Send(0, size_bytes)
        return
    for source in range(1, size):
        yield Receive(source)


def broadcast(rank: int, size: int, size_bytes: int) -> Pattern:
    """Binomial tree from rank 0."""
    distance = size // 2
    while distance:
        if rank % (2 * distance) == 0:
            yield Send(rank + distance, size_bytes)
        elif rank % (2 * distance) == distance:
            yield Receive(rank - distance)
        distance //= 2


def cached(rank: int, size: int, names: int) -> Pattern:
    """A cycle in which every pending tensor is in the cache."""
    yield from recursive_doubling(rank, size, vector_bytes(names))


def uncached(rank: int, size: int, names: int) -> Pattern:
    """A cycle in which no pending tensor is in the cache, such as a training's first."""
    yield from cached(rank, size, 0)
    yield from gather_lengths(rank, size)
    yield from gather_requests(rank, size, REQUEST_BYTES * names)
    yield from broadcast(rank, size, 4)
    yield from broadcast(rank, size, REQUEST_BYTES * names)


def exchange_seconds(
    pattern: Callable[[int, int, int], Pattern], size: int, names: int, costs: MessageCosts, network: Network
) -> float:
    """Of the messages alone."""
    return seconds_of([pattern(rank, size, names) for rank in range(size)], costs, network)


def ring_seconds(size: int, names: int, costs: MessageCosts, network: Network) -> float:
    """Of the bit vector's all-reduce around a ring."""
    steps, workers = 2 * (size - 1), min(size, RING_WORKERS)

    def ring(rank: int) -> Pattern:
        for _ in range(steps):
            yield Send((rank + 1) % workers, max(8, vector_bytes(names) // size))
            yield Receive((rank - 1) % workers)
        yield Spent(0.0)

    return seconds_of([ring(rank) for rank in range(workers)], costs, network)


def with_cycle(exchange: float) -> float:
    """From a worker's request to the verdict, on average: the rest of the cycle under way, and the exchange."""
    return max(CYCLE_SECONDS, exchange) / 2 + exchange
