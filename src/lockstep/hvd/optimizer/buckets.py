"""The plan of which gradients are reduced together, and the watch over those that are not reduced yet."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch

from lockstep.hvd.engine.request import Collective, Members

Tensor = torch.Tensor
BUCKET_BYTES = 25 << 20

CHANGED = (
    "the gradient of {changed!r} was changed between backward() and the reduction of all gradients, which also waits "
    "for {missing}. Call optimizer.synchronize() after backward(), before gradients are changed, and then "
    "optimizer.step() within `with optimizer.skip_synchronize():`"
)


@dataclass(eq=False)
class GradientSlot:
    """A parameter, and the number of backward passes until its gradient can be reduced."""

    name: str
    parameter: Tensor
    bucket: Bucket
    passes_left: int
    sparse: bool = False  # whether its last gradient was sparse
    hook: Any = None


@dataclass(eq=False)
class Bucket:
    """Parameters whose gradients are reduced by one operation.

    Attributes:
        key: The same on all workers for the same place in the plan, whatever the bucket contains.
        parts: How many buckets have been split off.
    """

    key: str
    slots: list[GradientSlot] = field(default_factory=list)
    missing: int = 0
    request: Collective | None = None  # its reduction, if the backward pass has started it and its end waits for it
    parts: int = 0

    def remove(self, slot: GradientSlot) -> None:
        """Remove a parameter."""
        self.slots.remove(slot)
        self.__dict__.pop("members", None)

    def split_off(self, slots: list[GradientSlot]) -> Bucket:
        """Move some of the parameters, which have no gradient yet, to a new bucket."""
        self.parts += 1
        apart = Bucket(f"{self.key}.{self.parts}", slots, missing=len(slots))
        for slot in slots:
            slot.bucket = apart
            self.remove(slot)
        self.missing -= len(slots)
        return apart

    @cached_property
    def members(self) -> Members:
        """What the workers compare."""
        return Members.of(self.key, [slot.name for slot in self.slots])


def plan_buckets(sizes_bytes: Sequence[int], limit_bytes: int) -> list[list[int]]:
    """Put parameters, by index, into buckets of at most `limit_bytes`, from last to first, as backward computes them.

    A parameter larger than the limit gets a separate bucket.
    """
    buckets: list[list[int]] = []
    total = 0
    for index in reversed(range(len(sizes_bytes))):
        if not buckets or total + sizes_bytes[index] > limit_bytes:
            buckets.append([])
            total = 0
        buckets[-1].append(index)
        total += sizes_bytes[index]
    return buckets


class Note(NamedTuple):
    """A gradient as the end of a backward pass has left it."""

    slot: GradientSlot
    gradient: Tensor
    version: int
    passes_left: int

    @property
    def is_changed(self) -> bool:
        """Whether the gradient has been changed since, by anything but another backward pass."""
        if self.slot.passes_left != self.passes_left:
            return False
        return self.slot.parameter.grad is not self.gradient or self.gradient._version != self.version


class UnreducedGradients:
    """Notices whether the script changes gradients between the end of a backward pass and the last reduction.

    Each worker would change its own gradients, or the mean of other ones than its peers, so the replicas would differ.
    """

    def __init__(self) -> None:
        self._notes: list[Note] = []
        self._changed: GradientSlot | None = None

    def note(self, slots: Iterable[GradientSlot]) -> None:
        """Remember the gradients, at the end of a backward pass that has left some unreduced."""
        gradients = ((slot, slot.parameter.grad) for slot in slots)
        self._notes = [
            Note(slot, grad, grad._version, slot.passes_left) for slot, grad in gradients if grad is not None
        ]

    def compare(self, arrived: GradientSlot | None = None) -> None:
        """Forget the gradients, but not whether one of them has been changed.

        Args:
            arrived: The first parameter to which another backward pass has added a gradient.
        """
        changed = (note.slot for note in self._notes if note.slot is not arrived and note.is_changed)
        self._changed = self._changed or next(changed, None)
        self._notes = []

    def forget(self, bucket: Bucket) -> None:
        """Forget the gradients of a bucket that the script has had reduced."""
        self._notes = [note for note in self._notes if note.slot.bucket is not bucket]

    def clear(self) -> None:
        self._notes, self._changed = [], None

    def check(self, slots: Iterable[GradientSlot]) -> None:
        """Raise RuntimeError if one of the gradients has been changed.

        Args:
            slots: All parameters, of which the error names one that has no gradient.
        """
        self.compare()
        if self._changed is None:
            return
        missing = next((slot for slot in slots if slot.passes_left > 0 and slot.parameter.requires_grad), None)
        if missing is None:
            reason = "gradients that other workers do not have before step()"
        elif missing.parameter.grad is None:
            reason = f"{missing.name!r}, which has no gradient on this worker"
        else:
            reason = f"{missing.name!r}, which has had fewer than backward_passes_per_step backward passes"
        raise RuntimeError(CHANGED.format(changed=self._changed.name, missing=reason))
