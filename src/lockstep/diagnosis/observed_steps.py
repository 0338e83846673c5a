"""The records of `lockstep run --observe-dir`: one worker's steps, samples and times, by `lockstep.world.observer`.

docs/reference/run-folder.md describes them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from lockstep.diagnosis.phases import BEFORE_BACKWARD, WAITING, Phase
from lockstep.files.jsonl import count, mapping, number, read_records, whole

KIND = "observed"
RESULT_MARK = "lockstep-steps "  # prefix of the line in which a worker of a study prints its result
PHASES: tuple[Phase, ...] = ("data_wait", "forward", BEFORE_BACKWARD, "backward", WAITING, "optimizer")


def record_file(folder: Path, rank: int | str) -> Path:
    return folder / f"rank-{rank}.jsonl"


def recorded_ranks(folder: Path) -> list[int]:
    """Return the ranks that have records in a folder, in their order."""
    names = (path.stem.removeprefix("rank-") for path in folder.glob("rank-*.jsonl"))
    return sorted(int(name) for name in names if name.isdecimal())


@dataclass
class ObservedSteps:
    """What the records of one worker say; after a restart of the job, of all its attempts.

    Args:
        steps: The number of steps.
        samples: The number of training samples; None if it is unknown.
        steps_per_second: Without the first step, and without what came after the last; 0 if there was only one step.
        phase_seconds: The mean time per step in each phase, on the device that trains.
    """

    steps: int = 0
    samples: int | None = None
    steps_per_second: float = 0.0
    phase_seconds: dict[Phase, float] = field(default_factory=dict)


def read_steps(path: Path) -> ObservedSteps:
    """Return the sums of a file of records; zeros if it does not exist. Invalid values count as missing.

    Raises:
        OSError: The file cannot be read.
    """
    result = ObservedSteps()
    timed, seconds, interval_steps, interval_seconds = 0, dict.fromkeys(PHASES, 0.0), 0, 0.0
    for record in read_records(path) if path.exists() else ():
        if record.get("kind") != KIND:
            continue
        result.steps += whole(record, "steps") or 0  # -1 if a step in the record before it was skipped
        samples = count(record, "samples")
        if samples is not None:
            result.samples = (result.samples or 0) + samples
        interval_steps += count(record, "interval_steps") or 0
        interval_seconds += max(number(record, "interval_seconds") or 0.0, 0.0)
        timed += count(record, "timed_steps") or 0
        for phase in PHASES:
            seconds[phase] += max(number(mapping(record, "phase_seconds"), phase) or 0.0, 0.0)
    if interval_seconds:
        result.steps_per_second = interval_steps / interval_seconds
    if timed:
        result.phase_seconds = {phase: total / timed for phase, total in seconds.items() if total}
    return result
