"""Plans an optimizer's steps, so that the workers agree once on all of them, instead of once for each bucket.

The first step is not planned, since only its gradients show which of them are sparse. At its end, the worker requests a
lane. The second step's end waits for the answer, since by then all workers have sent the request. Later steps are
planned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

import torch

from lockstep.hvd.engine import current
from lockstep.hvd.engine.channel import Channel
from lockstep.hvd.engine.lane import Lane, OpenLane, Plan
from lockstep.hvd.engine.request import Collective
from lockstep.hvd.exceptions import HorovodInternalError
from lockstep.hvd.ops.submission import submit
from lockstep.hvd.process_sets import ProcessSet

Tensor = torch.Tensor


class StepPlans:
    """The plans of one optimizer's steps: which all-reduces a step consists of, and in which order.

    Args:
        name: The optimizer's name, the same on all workers.
        like: Creates a request like the one for a bucket's gradients, from the bucket's name and parameters.
    """

    def __init__(self, name: str, process_set: ProcessSet, like: Callable[[str, Sequence[Tensor]], Collective]) -> None:
        self._name = name
        self._process_set = process_set
        self._like = like
        self._reset(None)

    def _reset(self, channel: Channel | None) -> None:
        """Start again with another channel of the process set, for example after hvd.init()."""
        self._channel = channel
        self._is_decided = False
        self._request: OpenLane | None = None
        self._joins = 0  # how many joins had ended on the channel when the lane was requested
        self._lane: Lane | None = None
        self._buckets: list[tuple[str, Sequence[Tensor]]] = []
        self._parts: list[Collective] = []
        self._kinds: list[tuple[torch.Size, torch.dtype]] = []  # of the parameters, when the parts were made
        self._step: Plan | None = None
        self._dropped: Plan | None = None

    def _follow_channel(self) -> None:
        number, context = self._process_set.process_set_id, current.context
        channel = None if context is None or number is None else context.channels.get(number)
        if channel is not self._channel:
            self._reset(channel)

    @property
    def has_begun(self) -> bool:
        """Whether the current step has a plan."""
        return self._step is not None

    @property
    def wants_lane(self) -> bool:
        """Whether a lane can be requested, at the end of a step.

        It cannot if this has been done: also by the other workers while this one had joined, and by an optimizer of the
        same name, which can be from before hvd.init().
        """
        self._follow_channel()
        channel = self._channel
        return channel is not None and channel.size > 1 and self._name not in channel.lanes

    def request_lane(self, buckets: Sequence[tuple[str, Sequence[Tensor]]], is_useful: bool) -> None:
        """Request a lane, if `wants_lane`.

        Args:
            buckets: The names and parameters of the buckets to plan, in their order.
            is_useful: Whether this worker's steps can be planned.
        """
        assert self._channel is not None
        self._channel.lanes[self._name] = None
        self._buckets = list(buckets)
        self._joins = self._channel.joins
        with suppress(HorovodInternalError):  # a worker has ended, maybe after this step
            self._request = submit(OpenLane, [], self._name, self._process_set, is_useful=is_useful)
        self._is_decided = self._request is None

    def end(self) -> None:
        """End a step whose gradients have been reduced."""
        self._step = None
        if self._request is not None and not self._is_decided:
            self._decide(self._request)

    def _decide(self, request: OpenLane) -> None:
        assert self._channel is not None
        self._channel.hurry()
        with suppress(HorovodInternalError):
            request.wait()
        lane = self._channel.lanes[self._name]
        self._lane = lane if isinstance(lane, Lane) else None
        self._is_decided = True

    def drop(self) -> None:
        """Give up a step that is not over. With the next step, other workers get NaN for the gradients it lacks."""
        if self._step is not None and not self._step.finished:
            self._dropped = self._step
            self._dropped.is_dropped = True
        self._step = None

    def begin(self) -> None:
        """Submit the plan of a step, if the optimizer has a lane and this has not been done yet.

        Raises:
            HorovodInternalError: A worker disconnected.
        """
        if self._step is not None:
            return
        self._follow_channel()
        if self._channel is None:
            return
        if self._request is not None and not self._is_decided and self._channel.joins != self._joins:
            self._decide(self._request)  # after a join, no worker is behind the others
        if self._lane is not None:
            self._end_dropped(self._channel)
            plan = Plan(self._name, self._current_parts())
            self._lane.submit(plan)
            self._step = plan

    def add(self, index: int, request: Collective) -> None:
        """Submit the all-reduce of the planned bucket `index`, after `begin`.

        Raises:
            HorovodInternalError: A worker disconnected.
            ValueError: The request differs from the plan.
        """
        assert self._step is not None
        assert self._lane is not None
        if request.entry != self._parts[index].entry:
            raise ValueError(f"{request.name}: gradients must have the shapes and dtypes of their parameters")
        self._lane.add(self._step, index, request)

    def _end_dropped(self, channel: Channel) -> None:
        """Wait until a dropped step is over, since a lane can execute only one at a time."""
        if self._dropped is None:
            return
        plan, self._dropped = self._dropped, None
        for lane in channel.connected_lanes():  # also other optimizers', which other workers may wait for first
            if isinstance(lane, Lane):
                lane.complete_dropped()
        for request in (plan, *plan.added):
            if request is not None:
                with suppress(HorovodInternalError):
                    request.wait()

    def _current_parts(self) -> list[Collective]:
        kinds = [(tensor.shape, tensor.dtype) for _, tensors in self._buckets for tensor in tensors]
        if kinds != self._kinds:
            self._kinds = kinds
            self._parts = [self._like(name, tensors) for name, tensors in self._buckets]
        return self._parts
