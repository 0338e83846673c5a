"""A question about a data-parallel program, and its answer from the records of all workers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Verdict = Literal["yes", "no", "hint", "not seen"]
Record = Mapping[str, Any]
Records = Mapping[int, Sequence[Record]]  # of each rank, in their order


@dataclass(frozen=True)
class Finding:
    """The answer to one question.

    Attributes:
        question: A sentence that is true of a correct program.
        verdict: Whether it is true; "hint" if it is not, but no fault for sure; "not seen" if the records cannot tell.
        detail: What was seen.
        where: "file:line" of the script, or "".
        fix: What to change if the verdict is "no" or "hint".
    """

    question: str
    verdict: Verdict
    detail: str = ""
    where: str = ""
    fix: str = ""


def events(records: Records, event: str) -> dict[int, list[Record]]:
    """Return the records of one kind, of each rank."""
    return {rank: [each for each in own if each["event"] == event] for rank, own in sorted(records.items())}


def rows_of(columns: Iterable[Sequence[Record]]) -> list[tuple[Record, ...]]:
    """Return the records of all workers, step by step, as far as each worker has any."""
    return list(zip(*columns, strict=False))


def are_equal(values: Sequence[Any]) -> bool:
    return all(value == values[0] for value in values)


def ranks(numbers: Sequence[int]) -> str:
    """Return "worker 1", or "workers 0, 2"."""
    return f"worker{'' if len(numbers) == 1 else 's'} {', '.join(map(str, numbers))}"
