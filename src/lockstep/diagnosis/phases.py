"""The phases of a training step: their names in code, records, messages, reports and `lockstep watch`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple, get_args

StepPhase = Literal["data_wait", "callbacks", "forward", "backward", "metrics", "optimizer", "reduction"]
Phase = Literal["starting", StepPhase, "before_backward", "evaluation", "checkpoint", "running"]
Phases = Mapping[Phase, float]  # seconds
PHASES: tuple[StepPhase, ...] = get_args(StepPhase)  # of the trainer's steps, in their order
WAITING: StepPhase = "reduction"  # for other workers; some flags make workers wait in other phases, too
BEFORE_BACKWARD: Phase = "before_backward"  # from the end of a step to the last backward pass's first gradient
RECORDED: tuple[Phase, ...] = (*PHASES, BEFORE_BACKWARD)  # the trainer's, and those of other programs


class PhaseNames(NamedTuple):
    """What users read: in messages (after "5 ms per step"), in reports, and in `lockstep watch`."""

    message: str
    report: str
    watch: str


NAMES: dict[str, PhaseNames] = {
    "data_wait": PhaseNames("waiting for data", "waiting for data", "data"),
    "callbacks": PhaseNames("in callbacks", "callbacks", "callbacks"),
    "forward": PhaseNames("in the forward pass", "forward", "forward"),
    "backward": PhaseNames("in the backward pass", "backward", "backward"),
    "metrics": PhaseNames("counting correct predictions", "metrics", "metrics"),
    "optimizer": PhaseNames("in the optimizer's step", "optimizer", "optimizer"),
    "before_backward": PhaseNames(
        "in other work, such as logging (without a DataLoader also loading)", "other work", "other"
    ),
    WAITING: PhaseNames("waiting for other workers", "waiting for other workers", "waiting"),
}


def names(phase: str) -> PhaseNames:
    """Return what users read for a phase; the phase itself if it is unknown."""
    return NAMES.get(phase, PhaseNames(phase, phase, phase))


class StepPart(NamedTuple):
    """A part of a step in the records of studies: the phase it is measured in, and its name in tables and figures."""

    phase: Phase
    name: str


STEP_PARTS: dict[str, StepPart] = {
    "data_wait": StepPart("data_wait", "data"),
    "forward": StepPart("forward", "forward"),
    "backward": StepPart("backward", "backward"),
    "communication_exposed": StepPart(WAITING, "exchange"),
    "optimizer": StepPart("optimizer", "optimizer"),
    "other": StepPart(BEFORE_BACKWARD, "other"),  # and in all phases that no other part has
}


def parts_of(phases: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of each part of a step; their sum is that of the phases."""
    parts = {name: phases.get(part.phase, 0.0) for name, part in STEP_PARTS.items() if name != "other"}
    return {**parts, "other": max(0.0, sum(phases.values()) - sum(parts.values()))}
