"""What a worker publishes about its steps: in memory, summed, and as a report."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from lockstep.diagnosis.board import Board
from lockstep.diagnosis.observed_steps import (
    NO_WAITS,
    NONE,
    PHASES,
    WAITS,
    LinkUse,
    ObservedSteps,
    ProgramFacts,
    TrainedState,
    sample_waits,
    transfer_seconds,
    usual_seconds,
)
from lockstep.diagnosis.phases import BEFORE_BACKWARD, WAITING, Phase, Phases
from lockstep.files.io_totals import AMOUNTS, IoTotals
from lockstep.observe.tcp_links import MAX_LINKS
from lockstep.script_check.state_recorder import MAX_LINE

SECONDS = tuple(float(number) for number in range(1, len(PHASES) + 1))
STATE = TrainedState(20, -1, 2**63 - 1, 3, 4, 5, 6, 7, 8, 9, True, False, True, 0.1, "train.py:31")
WAITED = tuple(map(float, range(WAITS)))
NUMBER, SECOND = -(2**63), -1.2345678901234567e-308  # the longest ones
FACTS = ProgramFacts(44_700_000, 4, 62, "ddp hook", 2, 16, 8, 3, 1.5, "device")
LONG_IO = IoTotals(SECOND, SECOND, (NUMBER,) * len(AMOUNTS))
LONG_STATE = TrainedState(*(NUMBER,) * 10, True, False, False, SECOND, "\ufffd" * MAX_LINE)
LONG_FACTS = ProgramFacts(*(NUMBER,) * 3, "hvd hook", *(NUMBER,) * 4, SECOND, "privateuseone", SECOND)
LONG_TIMES = ((SECOND,) * number for number in (len(PHASES), len(PHASES), WAITS))
LONG_LINKS = (LinkUse(2**32 - 1, 2**32 - 1, 10**12, 0.123, 2**32 - 1, 2**32 - 1),) * MAX_LINKS
LONGEST = ObservedSteps(
    *(NUMBER,) * 5, SECOND, *(NUMBER,) * 2, *LONG_TIMES, LONG_FACTS, LONG_STATE, LONG_IO, LONG_LINKS
)
STEPS = ObservedSteps(30, 240, 29, 232, 28, 2.5, 3, 20, SECONDS, SECONDS[::-1], WAITED, FACTS, STATE)


def test_published_steps_are_read_as_they_were_written(tmp_path: Path) -> None:
    board = Board(tmp_path, rank=1)
    reader = board.reader()
    assert reader.steps() is None
    not_utf8 = replace(STATE, line="\udcff" * MAX_LINE)
    for steps in (STEPS, ObservedSteps(steps=1, samples=None), replace(STEPS, state=not_utf8), LONGEST):
        board.publish_steps(steps)
        assert reader.steps() == steps


def test_steps_that_are_being_written_are_not_read(tmp_path: Path) -> None:
    board = Board(tmp_path, rank=1)
    board.publish_steps(STEPS)
    board.shared.writes_started += 1
    assert board.reader().steps() is None


def test_the_steps_of_processes_are_summed() -> None:
    other = ObservedSteps(steps=10, samples=None, interval_steps=9, timed_steps=10, interval_seconds=0.5)
    both = STEPS.plus(other).plus(ObservedSteps())
    assert (both.steps, both.samples, both.interval_seconds) == (40, 240, 3.0)
    assert both.phase_seconds == SECONDS
    assert both.steps_per_second == 38 / 3
    assert both.samples_per_second == 232 / 3
    own = {"report": 0, "report_steps": 0, "report_seconds": NONE}
    rest = ObservedSteps()
    assert both.plus(other, -1) == replace(STEPS, **own, waits=rest.waits, facts=rest.facts, state=rest.state)
    assert ObservedSteps().per_step == {}
    assert other.samples_per_second is None


def test_rare_long_steps_do_not_count_and_frequent_ones_do() -> None:
    """A checkpoint every 20 steps, or a loader whose 4 processes are all late every 4 steps."""

    def usual(long: float, interval: int) -> float:
        steps: list[Phases] = [{BEFORE_BACKWARD: 1.0 if number % interval else long} for number in range(100)]
        return usual_seconds(steps)[PHASES.index(BEFORE_BACKWARD)]

    assert usual(1000.0, 20) == 1.0
    assert 15 < usual(81.0, 4) < 21


def test_a_report_has_each_phases_mean() -> None:
    step: dict[Phase, float] = {BEFORE_BACKWARD: 1.0, "backward": 2.0}
    assert usual_seconds([step] * 3) == tuple(step.get(phase, 0.0) for phase in PHASES)


def _waits(seconds: list[float], published: int) -> tuple[float, ...]:
    """Return the sampled waits of a worker that publishes after so many steps each time."""
    waits = NO_WAITS
    for first in range(0, len(seconds), published):
        steps: list[Phases] = [{WAITING: each} for each in seconds[first : first + published]]
        waits = sample_waits(waits, steps, first + 1)
    return waits


def test_the_waits_of_the_same_steps_are_compared() -> None:
    """Of two workers, one waits for the other in turn, and the exchange takes 1 s."""
    early, late = ([1.0 + 4.0 * ((step // 3 + turn) % 2) for step in range(700)] for turn in (0, 1))
    for length in (10, 64, 700):
        found = transfer_seconds([_waits(early[:length], 7), _waits(late[:length], 50)])
        assert found == 1.0
    assert transfer_seconds([_waits(early, 7)]) > 1.0
    assert transfer_seconds([NO_WAITS, NO_WAITS]) is None
