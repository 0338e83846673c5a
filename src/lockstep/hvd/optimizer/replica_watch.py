"""Compares the parameters of all workers now and then while they train, without waiting for the result.

The workers' weights can differ without an error: if a script does not broadcast the initial weights, changes weights on
one worker, or runs on a faulty processor.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from typing import Any

import torch

from lockstep.diagnosis.replicas import Worker, describe, fingerprints, is_comparable
from lockstep.errors import ReplicasDifferError
from lockstep.hvd.engine import context as engine
from lockstep.hvd.exceptions import HorovodInternalError
from lockstep.hvd.ops.functions import CompareReplicas
from lockstep.hvd.ops.submission import submit
from lockstep.hvd.process_sets import ProcessSet
from lockstep.world import accelerator

Tensor = torch.Tensor
FIRST_STEP = 10  # some scripts broadcast weights and state after the first step, when the optimizer has a state
CAUSES = (
    "Likely causes: no hvd.broadcast_parameters() after the model was created or loaded, code that changes weights on "
    "one worker (if hvd.rank() == 0: ...), parameters without names in another order on each worker (pass "
    "named_parameters), or a faulty processor or memory. To train without this check, set LOCKSTEP_CHECK_REPLICAS=0"
)


class ReplicaWatch:
    """Compares the parameters of one optimizer after FIRST_STEP and then every LOCKSTEP_CHECK_REPLICAS steps.

    Args:
        name: The optimizer's name, the same on all workers.
    """

    def __init__(self, name: str, process_set: ProcessSet) -> None:
        self._name = name
        self._process_set = process_set
        self._restart()

    def _restart(self) -> None:
        """Count from the first step after hvd.init(), as a new worker of an elastic job does, and after hvd.join()."""
        self._context = engine.current
        self._joins = 0 if self._context is None else self._context.joins
        self._step = 0
        self._compared = 0  # the step whose weights are compared
        self._names: list[str] = []
        self._device = torch.device("cpu")
        self._copy: tuple[Tensor, Any] | None = None  # fingerprints on their way from the device, and an event
        self._request: CompareReplicas | None = None

    def end_step(self, named_parameters: Callable[[], Sequence[tuple[str, Tensor]]]) -> None:
        """Count a step; compare the weights if it is time, and read the result of the last comparison.

        Args:
            named_parameters: Returns the names and parameters to compare.

        Raises:
            ReplicasDifferError: The weights of the workers differ.
        """
        context = engine.current
        if context is not self._context or (context is not None and context.joins != self._joins):
            self._restart()
        if context is None or context.settings.check_replicas == 0 or context.rank_info.size == 1:
            return
        self._step += 1
        is_due = self._step == FIRST_STEP or self._step % context.settings.check_replicas == 0
        try:
            if self._copy is not None:
                sums, copied = self._copy
                copied.synchronize()
                self._send(sums)
            if self._request is not None and (is_due or self._request.finished):
                self._judge(self._request)
            if is_due:
                self._start([(name, each) for name, each in named_parameters() if is_comparable(each)])
        except HorovodInternalError:
            if not context.broken:
                raise
            self._copy = self._request = None  # the next reduction reports which worker has disconnected

    def _start(self, named_parameters: Sequence[tuple[str, Tensor]]) -> None:
        if not named_parameters:
            return
        self._compared, self._names = self._step, [name for name, _ in named_parameters]
        with torch.no_grad():
            sums = fingerprints([parameter for _, parameter in named_parameters])
        self._device = sums.device
        if sums.is_cpu:
            self._send(sums)
        else:  # sent with the next step, so that the host does not wait for this one
            copy = accelerator.pinned_like(sums).copy_(sums, non_blocking=True)
            self._copy = copy, accelerator.current_stream(sums.device).record_event()

    def _send(self, sums: Tensor) -> None:
        self._copy = None
        replica = (socket.gethostname(), sums.tolist(), accelerator.processor(self._device))
        self._request = submit(CompareReplicas, [], self._name, self._process_set, replica=replica)

    def _judge(self, request: CompareReplicas) -> None:
        self._request = None
        replicas: dict[int, Worker] | None = request.wait()
        if replicas is None:
            return
        counts = {rank: len(sums) for rank, (_, sums, _) in replicas.items()}
        if len(set(counts.values())) > 1:
            raise ReplicasDifferError(
                f"the workers' optimizers have different numbers of parameters, by rank: {counts}"
            )
        columns = zip(*(sums for _, sums, _ in replicas.values()), strict=True)
        different = [index for index, column in enumerate(columns) if len(set(column)) > 1]
        workers = {
            rank: (host, [sums[index] for index in different], kind) for rank, (host, sums, kind) in replicas.items()
        }
        names = [self._names[index] for index in different]
        raise ReplicasDifferError(
            describe(self._compared, names, len(self._names), workers, CAUSES, "set LOCKSTEP_CHECK_REPLICAS=0")
        )
