"""A lane: the connection of one optimizer, whose steps need no rounds of agreement.

A step consists of the all-reduces of its buckets, in a fixed order: its plan. The workers agree on it in a round, once.
In later steps they start with the first all-reduce, which also carries two numbers: whether a worker has this plan (1,
or 0 if it has joined and sends zeros), and whether it has another one (1). Only if some worker has another plan, or if
all have joined, a round follows.

A lane has its own connection and thread, because it can execute nothing else while it waits for a bucket.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Self

import torch

from lockstep.hvd.engine.channel import Channel
from lockstep.hvd.engine.exchange import Exchange
from lockstep.hvd.engine.request import Collective, Description, kind_of
from lockstep.hvd.exceptions import HorovodInternalError

CPU = torch.device("cpu")
HAS_PLAN, HAS_ANOTHER = (1.0, 0.0), (0.0, 1.0)
NO_LONGER_PLANNED = (
    "hvd.join() was called between backward() and step(), so the other workers got zeros in place of this worker's "
    "gradients. Call step() before join()."
)


class OpenLane(Collective, kind="lane"):
    """Opens a lane for an optimizer, if it is useful to all workers. It is not to one that has joined.

    Args:
        name: The optimizer's name.
    """

    __slots__ = ("is_useful", "lane")
    joinable = True

    def __init__(self, name: str, tensors: Sequence[torch.Tensor] = (), *, is_useful: bool = False, **options: Any):
        super().__init__(name, tensors, urgent=True, **options)
        self.lane = name
        self.is_useful = is_useful

    def execute(self, exchange: Exchange) -> None:
        is_useful = all(flag for (flag,) in exchange.numbers([self.is_useful]))
        if is_useful:
            exchange.release_buffers()  # the gradients' buffer is now the lane's
        self.channel.open_lane(self.lane, is_useful)


class Plan(Collective, kind="plan"):
    """The all-reduces of one step. Each is executed after the ones before it, once this worker has added it.

    Args:
        name: The optimizer's name.
        parts: Equal to the all-reduces in all that workers must agree on; never executed. The last tensor of the
            first one has two elements, for HAS_PLAN.
    """

    __slots__ = ("added", "is_dropped", "parts")
    joinable = True

    def __init__(self, name: str, parts: Sequence[Collective]) -> None:
        super().__init__(name, terms=tuple([part.entry for part in parts]), urgent=True)
        self.parts = parts
        self.added: list[Collective | None] = [None] * len(parts)
        self.is_dropped = False  # whether the script has given up the step

    def describe(self) -> Description:
        parts = [part.describe() for part in self.parts]
        return super().describe() | {"terms": [part.name for part in self.parts], "parts": parts}

    @classmethod
    def difference(cls, terms: Sequence[Any], others: Sequence[Any]) -> str:
        if terms == others:
            return ""
        return f"gradients: One rank reduces {json.dumps(terms)}, but another rank reduces {json.dumps(others)}."

    @classmethod
    def of_zeros(cls, description: Description, device: torch.device) -> Self:
        parts = [_zeros(part) for part in description["parts"]]
        plan = cls(description["name"].partition(".")[2], parts)
        plan.added = list(parts)
        return plan


class Lane(Channel):
    """Executes an optimizer's plans. Nothing else is submitted to it, and only one plan at a time."""

    def __init__(self, *arguments: Any) -> None:
        self._agreed = b""  # the entry of the plan on which the workers agreed last, and its description
        self._description: Description = {}
        super().__init__(*arguments)

    def submit(self, request: Any) -> Any:
        """Submit a plan.

        Raises:
            HorovodInternalError: The lane is closed.
        """
        request.channel = self
        with self._lock:
            if self._closing is not None:
                raise HorovodInternalError(self._closing)
            self._enter(request)
            self._urgent = True
        if request.entry != self._agreed:  # otherwise, the thread can sleep until the first part is added
            self._bell.ring()
        return request

    def add(self, plan: Plan, index: int, part: Collective) -> None:
        """Add a part to a plan that was submitted; if the plan has failed, so does the part.

        Raises:
            HorovodInternalError: The lane is closed, or zeros took the part's place because this worker has joined.
        """
        part.channel = self
        with self._lock:
            if self._closing is not None:
                raise HorovodInternalError(self._closing)
            if plan.added[index] is not None:
                raise HorovodInternalError(NO_LONGER_PLANNED)
            failed = self._pending.get(plan.key) is not plan
            if not failed:
                plan.added[index] = part
                self._enter(part)
        if failed:
            with plan.waiting:
                part.finish(error=plan.error)
        else:
            self._bell.ring()

    def complete(self, plan: Plan, value: float) -> None:
        """Add tensors filled with `value` for all parts that are missing in a plan, so that other workers can go on."""
        for index, part in enumerate(plan.parts):
            if plan.added[index] is None:
                filled = _zeros(part.describe())
                for tensor in filled.tensors:
                    tensor.fill_(value)
                if index == 0:
                    filled.tensors[-1].copy_(torch.tensor(HAS_PLAN))
                with suppress(HorovodInternalError):  # the lane is closed
                    self.add(plan, index, filled)

    def complete_dropped(self) -> None:
        """Complete the pending plan with NaN, if the script has dropped it."""
        for plan in self._announced():
            if plan.is_dropped:
                self.complete(plan, math.nan)

    def _start_join(self, request: Collective, device: torch.device) -> None:
        for plan in self._announced():
            self.complete(plan, 0.0)
        super()._start_join(request, device)

    def _announced(self) -> list[Any]:
        return [request for request in super()._announced() if isinstance(request, Plan)]

    def _awaited(self) -> list[Collective]:
        """Return the part that is next, if this worker has added it: the others wait for it, too."""
        with self._lock:
            found = [self._join[0]] if self._join else []
            for plan in self._announced():
                following = next((part for part in plan.added if part is None or not part.finished), None)
                found += [following] if following is not None else []
        return found

    def _round(self) -> bool:
        """Take part in the plan on which the workers agreed last; agree in a round if there is none, or a new one."""
        if not self._agreed:
            return super()._round()
        plans = self._announced()
        assert plans or self._join is not None
        has_plan = bool(plans) and plans[0].entry == self._agreed
        plan = plans[0] if has_plan else Plan.of_zeros(self._description, CPU)
        if plans and not has_plan:
            plan.parts[0].tensors[-1].copy_(torch.tensor(HAS_ANOTHER))
        first = self._part(plan, 0)
        if first is None:
            return False
        results = self._execution.execute([first])
        have_plan, have_another = results[0][-1].tolist()
        if have_another or not have_plan:
            return super()._round()
        self._end_part(plan, 0, results)
        self._execute_parts(plan, 1)
        return True

    def _execute(self, requests: Sequence[Any]) -> None:
        for plan in requests:  # one at most
            self._agreed, self._description = plan.entry, plan.describe()
            self._execute_parts(plan, 0)

    def _execute_parts(self, plan: Plan, start: int) -> None:
        for index in range(start, len(plan.parts)):
            part = self._part(plan, index)
            if part is None:
                return
            self._end_part(plan, index, self._execution.execute([part]))

    def _part(self, plan: Plan, index: int) -> Collective | None:
        """Wait until this worker has added a part; None if the lane is closed."""
        while plan.added[index] is None and self._closing is None:
            self._bell.wait()
        return None if self._closing is not None else plan.added[index]

    def _end_part(self, plan: Plan, index: int, results: Sequence[Any]) -> None:
        """Set a part's result, and end the plan with the last one, after which this worker may submit the next plan."""
        part = plan.added[index]
        assert part is not None
        if index == len(plan.parts) - 1:
            self.steps += 1
            self._finish([plan, part], [None, *results])
        else:
            self._finish([part], results)

    def _fail(self, requests: Sequence[Collective], error: str | None) -> None:
        super()._fail(requests, error)
        for plan in requests:
            if isinstance(plan, Plan):  # it is not pending any more, so no part can be added now
                super()._fail([part for part in plan.added if part is not None], error)


def _zeros(part: Description) -> Collective:
    return kind_of(part).of_zeros(part, CPU)
