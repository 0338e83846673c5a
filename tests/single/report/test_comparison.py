"""The statistic of `lockstep compare`: verdicts for runs whose difference is known by construction."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest

from lockstep.report.comparison import WHOLE, StepTimes, compare, difference

PARTS = {"data_wait": 1e-3, "forward": 3e-3, "backward": 5e-3, "communication_exposed": 2e-3, "optimizer": 1.5e-3}
ALL = (*PARTS, "other")
Job = list[list[StepTimes]]


def _job(
    slow: dict[str, float] | None = None,
    runs: int = 1,
    records: int = 20,
    noise: float = 0.005,
    busy: Sequence[float] = (),
    start: float = 0.0,
    samples: float = 64.0,
    seed: int = 0,
    busy_cores: Sequence[float | None] = (),
) -> Job:
    """Return a job's records.

    Args:
        slow: Factors of parts of a step.
        noise: Relative standard deviation of a record.
        busy: Factor of all parts in each record, from the first one on.
        start: When the first run starts; runs take 100 s and start every 200 s.
        busy_cores: Of the records of each run, the last value being that of the rest.
    """
    draw = random.Random(f"{seed} {start} {slow}")
    job: Job = []
    for run in range(runs):
        job.append([])
        for index in range(records):
            factor = busy[index] if index < len(busy) else 1.0
            parts = {
                name: seconds * (slow or {}).get(name, 1.0) * factor * math.exp(draw.gauss(0, noise))
                for name, seconds in PARTS.items()
            }
            time = start + 200 * run + 100 * index / records
            cores = busy_cores[min(index, len(busy_cores) - 1)] if busy_cores else None
            job[-1].append(StepTimes({**parts, WHOLE: sum(parts.values())}, samples, time, cores))
    return job


EVERYWHERE = dict.fromkeys(PARTS, 1.2)


@pytest.mark.parametrize(
    ("a", "b", "verdict", "cause"),
    [
        # single runs, one after the other
        (_job(), _job(start=200), "no difference", ""),
        (_job(), _job({"forward": 1.2}, start=200), "slower", "forward"),
        (_job({"forward": 1.2}), _job(start=200), "faster", "forward"),
        (_job(), _job({"backward": 1.15}, start=200), "slower", "backward"),  # the longest part
        (_job(), _job(EVERYWHERE, start=200), "unclear", "backward"),  # or a machine in use
        (_job(), _job({"data_wait": 3.0}, start=200), "unclear", "data_wait"),  # or other readers of the disk
        (_job(), _job({"communication_exposed": 2.0}, start=200), "unclear", "communication_exposed"),
        (_job(), _job(busy=[1.3] * 10, start=200), "unclear", ""),  # during half of the run
        (_job(noise=0.3), _job(noise=0.3, start=200), "unclear", ""),
        (_job(records=1), _job(records=1, start=200), "unclear", ""),
        (_job(noise=0), _job(noise=0, start=200), "no difference", ""),
        # several runs, first those of A
        (_job(runs=5), _job({"forward": 1.2}, runs=5, start=2000), "slower", "forward"),
        (_job(runs=5), _job(EVERYWHERE, runs=5, start=2000), "unclear", "backward"),
        # in turn
        (_job(runs=5), _job(EVERYWHERE, runs=5, start=100), "slower", "backward"),
        (_job(runs=5), _job({"data_wait": 3.0}, runs=5, start=100), "slower", "data_wait"),
        (_job(runs=5), _job(runs=5, start=100), "no difference", ""),
        (_job(runs=5, noise=0.5), _job(runs=5, noise=0.5, start=100), "unclear", ""),
    ],
)
def test_a_known_difference_has_its_verdict(a: Job, b: Job, verdict: str, cause: str) -> None:
    found = compare(a, b)
    assert (found.verdict, found.cause) == (verdict, cause)


SLOW_FORWARD = {"forward": 1.2}


@pytest.mark.parametrize(
    ("a", "b", "verdict"),
    [
        # other work in all of a run may slow some parts more than others
        (_job(busy_cores=[1.0]), _job(SLOW_FORWARD, busy_cores=[1.1], start=200), "slower"),
        (_job(busy_cores=[1.0]), _job(SLOW_FORWARD, busy_cores=[2.0], start=200), "unclear"),
        (_job(SLOW_FORWARD, busy_cores=[2.0]), _job(busy_cores=[1.0], start=200), "unclear"),
        (_job(busy_cores=[1.0]), _job({"forward": 0.8}, busy_cores=[2.0], start=200), "faster"),  # by more threads
        (_job(), _job({**dict.fromkeys(PARTS, 1.15), "optimizer": 2.0}, start=200), "unclear"),  # for the memory
        # in some records of a run
        (_job(busy_cores=[1.0]), _job(busy=[1.3] * 8, busy_cores=[2.0] * 8 + [1.0], start=200), "no difference"),
        (_job(busy_cores=[1.0]), _job(busy=[1.3] * 8, start=200), "unclear"),
        (_job(busy_cores=[1.0]), _job(busy=[1.3] * 15, busy_cores=[2.0] * 15 + [1.0], start=200), "unclear"),
    ],
)
def test_other_work_on_the_cores_is_not_taken_for_the_job(a: Job, b: Job, verdict: str) -> None:
    assert compare(a, b).verdict == verdict


@pytest.mark.parametrize(("slow", "verdict"), [(1.0, "no difference"), (1.06, "slower")])
def test_a_machine_that_becomes_slower_affects_both(slow: float, verdict: str) -> None:
    jobs: list[Job] = [[], []]
    for turn in range(20):
        job = _job(dict.fromkeys(PARTS, slow) if turn % 2 else None, busy=[1.05**turn] * 20, start=100.0 * turn)
        jobs[turn % 2] += job
    found = compare(*jobs)
    assert (found.verdict, found.measured.middle) == (verdict, pytest.approx(slow - 1, abs=0.005))


def test_different_batches_are_compared_by_sample() -> None:
    found = compare(_job(), _job(dict.fromkeys(PARTS, 2.0), samples=128, start=200))
    assert (found.noun, found.verdict) == ("sample", "no difference")
    assert found.seconds["forward"] == pytest.approx([3e-3 / 64] * 2, rel=0.01)
    unknown = compare(_job(), _job(EVERYWHERE, samples=0.0, start=200))
    assert unknown.noun == "step"
    assert unknown.measured.middle == pytest.approx(0.2, rel=0.02)


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [  # Welch's interval, of 99 %, from a table of Student's t
        ((0.0, 0.1), (0.1, 0.2), (0.1, 9.92 * 0.005**0.5 * 2**0.5 / 2**0.5 * 2**0.5 / 2**0.5)),
        ((0.0, 0.0), (0.1, 0.1), (0.1, 0.0)),
        ((0.0, 0.1, 0.2), (0.0, 0.1, 0.2), (0.0, 4.6 * (0.02 / 3) ** 0.5)),
    ],
)
def test_the_interval_is_that_of_welchs_test(
    a: Sequence[float], b: Sequence[float], expected: tuple[float, float]
) -> None:
    found = difference(a, b)
    assert (math.log1p(found.middle), math.log1p(found.high) - math.log1p(found.middle)) == pytest.approx(expected)


def _beside_a_busy_loop(draw: random.Random, slow: float, start: float, records: int = 12) -> list[StepTimes]:
    """Return a run during some of which, or all, another process uses the cores; the noise of neighbors is correlated.

    The process slows the parts of a step by up to 60 %, and each a little differently.
    """
    load, drift, found = draw.choice([0.0, 0.0, 0.3, 0.6]) * draw.random(), draw.gauss(0, 0.01), []
    begins, ends = sorted(draw.choices(range(records + 1), k=2))
    for index in range(records):
        drift = 0.7 * drift + draw.gauss(0, 0.01)
        shared = math.exp(drift) * (1 + load * (begins <= index < ends or load > 0.4))
        parts = {name: seconds * shared * math.exp(draw.gauss(0, 0.01)) for name, seconds in PARTS.items()}
        parts["forward"] += slow * sum(PARTS.values()) * shared
        found.append(StepTimes({**parts, WHOLE: sum(parts.values())}, 64.0, start + index))
    return found


def _verdicts(slow: float, runs: int, number: int) -> list[str]:
    draw, found = random.Random(7), list[str]()
    for _ in range(number):
        sides: tuple[Job, Job] = ([], [])
        for turn in range(2 * runs):
            sides[turn % 2].append(_beside_a_busy_loop(draw, slow * (turn % 2), 100.0 * turn))
        found.append(compare(*sides).verdict)
    return found


@pytest.mark.parametrize("runs", [1, 5, 10])
def test_at_most_one_of_40_equal_pairs_has_a_wrong_verdict(runs: int) -> None:
    verdicts = _verdicts(0.0, runs, 40)
    assert sum(verdict in ("slower", "faster") for verdict in verdicts) <= 1


def test_18_of_20_slower_jobs_are_found_in_turn() -> None:
    assert _verdicts(0.05, 10, 20).count("slower") >= 18
