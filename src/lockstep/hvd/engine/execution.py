"""Executes the requests that the workers agreed on, in batches, on the set's stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from lockstep.hvd.engine.connections import Links
from lockstep.hvd.engine.exchange import Exchange
from lockstep.hvd.engine.fusion import plan_fusion
from lockstep.hvd.engine.request import Collective
from lockstep.hvd.monitoring.timeline import Timeline


class Execution:
    """Executes agreed requests of one process set, all workers in the same order.

    Args:
        links: The data collectives by device.
        exchange: Passed to the requests; released before the links.
        threshold_bytes: The largest fused batch.
        finish: Called with requests and their results.
    """

    def __init__(
        self,
        links: Links,
        exchange: Exchange,
        threshold_bytes: int,
        timeline: Timeline,
        finish: Callable[[Sequence[Collective], Sequence[Any]], None],
    ) -> None:
        self._links = links
        self._exchange = exchange
        self._threshold_bytes = threshold_bytes
        self._timeline = timeline
        self._finish = finish

    def run(self, requests: Sequence[Collective]) -> None:
        """Execute the requests."""
        for batch in plan_fusion(requests, self._threshold_bytes):
            device = batch[0].tensors[0].device if batch[0].tensors else torch.device("cpu")
            self._exchange.transfers = self._links.transfers(device)
            with self._timeline.activity(batch), self._links.on_stream(device, batch) as stream:
                results = type(batch[0]).execute_all(batch, self._exchange)
            ready = stream.record_event() if stream else None
            for request in batch:
                request.ready = ready
            self._finish(batch, results)
