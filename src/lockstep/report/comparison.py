"""Compare the steps of two jobs: the difference of their time with its interval, and the part of a step that causes it.

Other work on a machine slows the parts of a step, for seconds or for whole runs. If the runs of the two jobs alternate,
it affects both, and each run is compared with the mean of those before and after it, which are of the other job.
Otherwise, records with more busy cores than the others of their job are left out, if enough remain. Other work may then
explain any change of waits, several times the median change of the computing parts, and a slowdown with more busy
cores; the interval covers what remains without it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import truediv
from statistics import fmean, median, variance
from typing import Literal, NamedTuple

QUANTILES = (63.7, 9.92, 5.84, 4.6, 4.03, 3.71, 3.5, 3.36, 3.25, 3.17)  # of Student's t for 99 %, by degrees of freedom
MAX_RATIO = math.log(1000.0)  # at which intervals are cut
NEGLIGIBLE = 5e-4  # is shown as 0.0 %
MAX_BLOCKS = 10  # of a run
MIN_QUIET = 9  # runs
QUIET_INFLATION = 2.0  # of the variance, as the quieter half of normal values varies less than their mean
MIN_RECORDS, MIN_RUNS = 3, 3  # of a run, of a job
MIN_SHARE = 0.05  # of the step: shorter parts are too noisy to compare with
SAME_BATCH = 0.01  # relative difference, as the last batch of an epoch may be smaller
UNEVEN = 4.0  # times the change of the usual part: that of the whole, where other work takes the memory's bandwidth
OTHER_CORES = 0.2  # busy with other work, at which a step is slower
MAX_BOUND = 0.1  # a wider interval around no difference is unclear
WHOLE = "all"  # the name of the step beside those of its parts
NOT_COMPUTING = (WHOLE, "data_wait", "communication_exposed")  # the latter two depend on other processes
Pair = tuple[float, float]  # of A and B


class StepTimes(NamedTuple):
    """Seconds of a step (`WHOLE`) and of its known parts, its samples (0: unknown), and the Unix time of the record.

    `busy_cores` are those of rank 0's host, whichever programs use them; None: unknown.
    """

    seconds: Mapping[str, float]
    samples: float
    unix_time: float
    busy_cores: float | None = None


Job = Sequence[Sequence[StepTimes]]  # the records of each run


class Turn(NamedTuple):
    """The usual times of a run, and of those before and after it, which are of the other job."""

    before: StepTimes
    run: StepTimes
    after: StepTimes
    sign: int  # 1 for a run of B, -1 for one of A


class Interval(NamedTuple):
    """A relative difference of B from A with its interval, such as 0.05 for 5 % more time."""

    low: float
    middle: float
    high: float

    @property
    def is_certain(self) -> bool:
        return self.low > NEGLIGIBLE or self.high < -NEGLIGIBLE

    @property
    def bound(self) -> float:
        return max(-self.low, self.high)

    def over(self, other: Interval) -> Interval:
        """Return the interval that contains both."""
        return Interval(min(self.low, other.low), self.middle, max(self.high, other.high))


@dataclass(frozen=True)
class Comparison:
    """The result of `compare`.

    `interval` is the difference with and without what other work on the machine may have caused. The times are those of
    a step or, if steps have different numbers of samples, of a sample. `seconds` are the usual ones of `WHOLE` and each
    part, and `cause` is the part that explains most of the difference, or "" if no part certainly differs.
    """

    measured: Interval
    interval: Interval
    noun: Literal["step", "sample"]
    alternate: bool
    seconds: Mapping[str, Pair]
    cause: str

    @property
    def verdict(self) -> Literal["slower", "faster", "no difference", "unclear"]:
        if self.interval.is_certain:
            return "slower" if self.interval.low > 0 else "faster"
        return "unclear" if self.measured.is_certain or self.interval.bound > MAX_BOUND else "no difference"


def compare(a: Job, b: Job) -> Comparison:
    """Compare two jobs by the records of their runs, or by parts of these if a job has only one run."""
    jobs, batches = [a, b], [median(each.samples for run in job for each in run) for job in (a, b)]
    has_same = math.isclose(*batches, rel_tol=SAME_BATCH) or not all(batches)
    if not has_same:
        jobs = [
            [[_per_sample(each, batch) for each in run] for run in job]
            for job, batch in zip(jobs, batches, strict=True)
        ]
    noun: Literal["step", "sample"] = "step" if has_same else "sample"
    if min(len(a), len(b)) > 1:
        runs = [[_blocks(run, 1)[0] for run in job] for job in jobs]
        if len(turns := _turns(runs)) >= min(len(a), len(b)):
            return _compare_in_turn(jobs, noun, runs, turns)
    return _compare_apart(jobs, noun)


def _compare_in_turn(
    jobs: Sequence[Job], noun: Literal["step", "sample"], runs: Sequence[Sequence[StepTimes]], turns: Sequence[Turn]
) -> Comparison:
    """Compare runs with those before and after; if that is unclear, the quieter half of many, which has no outliers."""
    logs = _logarithms(runs)
    changes = {name: _difference_in_turn(turns, name) for name in logs}
    measured = interval = changes[WHOLE]
    if not measured.is_certain and min(map(len, jobs)) >= MIN_QUIET:
        quiet_logs = _logarithms([_quiet([_blocks(_quiet(run), 1)[0] for run in job]) for job in jobs])
        quiet = {name: difference(*columns, inflation=QUIET_INFLATION) for name, columns in quiet_logs.items()}
        if quiet[WHOLE].is_certain and measured.low <= quiet[WHOLE].middle <= measured.high:
            logs, interval, changes = quiet_logs, quiet[WHOLE], quiet
    seconds = _usual(logs)
    return Comparison(measured, interval, noun, True, seconds, _cause(changes, seconds))


def _compare_apart(jobs: Sequence[Job], noun: Literal["step", "sample"]) -> Comparison:
    """Compare runs, or parts of single ones, and add what other work on the machine may have caused."""
    by_block = min(map(len, jobs)) == 1
    inflation = None if by_block else 1.0
    jobs = [_undisturbed(job) for job in jobs]
    sides = [[each for run in job for each in _blocks(run, MAX_BLOCKS if by_block else 1)] for job in jobs]
    logs = _logarithms(sides)
    changes = {name: difference(*columns, inflation=inflation) for name, columns in logs.items()}
    measured, seconds = changes[WHOLE], _usual(logs)
    own, usual = _computing(changes, seconds)
    rests = ([_beyond(each, own, usual) for each in side] for side in sides)
    interval = measured.over(difference(*rests, inflation=inflation))
    all_changed = fmean(changes[name].middle for name in usual) * math.copysign(UNEVEN, measured.middle)
    if all_changed > abs(measured.middle) or _slower_is_busier(sides, measured):
        interval = interval.over(Interval(0.0, 0.0, 0.0))
    return Comparison(measured, interval, noun, False, seconds, _cause(changes, seconds))


def _per_sample(times: StepTimes, batch: float) -> StepTimes:
    return times._replace(seconds={name: seconds / batch for name, seconds in times.seconds.items()})


def _undisturbed(job: Job) -> Job:
    """Return the records without other work, as far as known; all, if few runs, or half of the only one, have none."""
    busy = sorted(each.busy_cores for run in job for each in run if each.busy_cores is not None)
    if len(busy) < sum(map(len, job)):
        return job
    most = busy[len(busy) // 10] + OTHER_CORES
    kept = [[each for each in run if each.busy_cores is not None and each.busy_cores <= most] for run in job]
    kept = [run for run in kept if len(run) >= MIN_RECORDS]
    is_enough = len(kept) >= MIN_RUNS if len(job) > 1 else 2 * sum(map(len, kept)) >= len(busy)
    return kept if is_enough else job


def _slower_is_busier(sides: Sequence[Sequence[StepTimes]], measured: Interval) -> bool:
    """Return whether more cores were busy in the slower job, so that other work may have slowed it."""
    a, b = (median(each.busy_cores or 0.0 for each in side) for side in sides)
    return (b - a if measured.middle > 0 else a - b) > OTHER_CORES


def _logarithms(sides: Sequence[Sequence[StepTimes]]) -> dict[str, list[list[float]]]:
    """Return those of the times of the step and of each part that all have."""
    names = [name for name in sides[0][0].seconds if all(each.seconds.get(name) for side in sides for each in side)]
    return {name: [[math.log(each.seconds[name]) for each in side] for side in sides] for name in names}


def _usual(logs: Mapping[str, Sequence[Sequence[float]]]) -> dict[str, Pair]:
    return {name: (math.exp(fmean(a)), math.exp(fmean(b))) for name, (a, b) in logs.items()}


def _quiet(times: Sequence[StepTimes]) -> list[StepTimes]:
    """Return the faster half, of at least three: other work only slows."""
    return sorted(times, key=lambda each: each.seconds[WHOLE])[: (len(times) + 3) // 2]


def difference(a: Sequence[float], b: Sequence[float], *, inflation: float | None = 1.0) -> Interval:
    """Return the relative difference between two sets of logarithms of times (Welch's t-test).

    Args:
        inflation: By how much the variance of a mean is larger than that of independent values; None: it is that of a
            single value, as the sets are parts of one run each, and runs differ as much as their parts do.
    """
    middle = fmean(b) - fmean(a)
    if min(len(a), len(b)) == 1:
        return _interval(middle, math.inf, 1)
    errors = [variance(side) / len(side) * (inflation or len(side)) for side in (a, b)]
    squares = sum(error**2 / (len(side) - 1) for error, side in zip(errors, (a, b), strict=True))
    return _interval(middle, math.sqrt(sum(errors)), int(sum(errors) ** 2 / squares) if squares else 1)


def _blocks(records: Sequence[StepTimes], most: int) -> list[StepTimes]:
    """Return the medians of up to `most` parts of a run."""
    number, blocks = min(len(records), most), list[StepTimes]()
    for index in range(number):
        part = records[index * len(records) // number : (index + 1) * len(records) // number]
        names = [name for name in part[0].seconds if all(name in each.seconds for each in part)]
        seconds = {name: median(each.seconds[name] for each in part) for name in names}
        time = fmean(each.unix_time for each in part)
        blocks.append(StepTimes(seconds, median(each.samples for each in part), time, _busy_cores(part)))
    return blocks


def _busy_cores(records: Sequence[StepTimes]) -> float | None:
    known = [each.busy_cores for each in records if each.busy_cores is not None]
    return median(known) if known else None


def _turns(sides: Sequence[Sequence[StepTimes]]) -> list[Turn]:
    """Return the runs that are between two of the other job, with these."""
    runs = sorted(((run, side) for side in (0, 1) for run in sides[side]), key=lambda each: each[0].unix_time)
    triples = zip(runs, runs[1:], runs[2:], strict=False)
    return [Turn(a[0], b[0], c[0], 2 * b[1] - 1) for a, b, c in triples if a[1] == c[1] != b[1]]


def _difference_in_turn(turns: Sequence[Turn], name: str) -> Interval:
    """Return the difference from the runs before and after, however slowly the machine's speed changes.

    The variances are those of independent runs. Neighboring differences share two runs: about half of them count.
    """
    found, number = list[float](), len(turns)
    for turn in turns:
        before, run, after = (math.log(each.seconds[name]) for each in (turn.before, turn.run, turn.after))
        found.append(turn.sign * (run - (before + after) / 2))
    of_mean = (4 * number - 3) / number**2  # its variance, in that of a run; that of a difference is 1.5
    of_run = sum((each - fmean(found)) ** 2 for each in found) / number / (1.5 - of_mean)
    return _interval(fmean(found), math.sqrt(of_run * of_mean), number // 2)


def _interval(middle: float, error: float, freedom: int) -> Interval:
    """Return the interval of 99 % of Student's t of a logarithm."""
    quantile = QUANTILES[freedom - 1] if freedom <= len(QUANTILES) else 2.58 + 5.9 / freedom
    ends = (
        max(-MAX_RATIO, min(end, MAX_RATIO)) for end in (middle - quantile * error, middle, middle + quantile * error)
    )
    return Interval(*map(math.expm1, ends))


def _computing(changes: Mapping[str, Interval], seconds: Mapping[str, Pair]) -> tuple[list[str], list[str]]:
    """Return the computing parts, and the one or two of them whose change is the median of those of the long ones."""
    own = sorted(set(changes) - {*NOT_COMPUTING}, key=lambda name: changes[name].middle) or [WHOLE]
    long = [name for name in own if min(map(truediv, seconds[name], seconds[WHOLE])) >= MIN_SHARE] or own
    return own, long[(len(long) - 1) // 2 : len(long) // 2 + 1]


def _beyond(times: StepTimes, own: Sequence[str], usual: Sequence[str]) -> float:
    """Return the logarithm of the time of a step's own parts, relative to the usual parts."""
    return math.log(sum(times.seconds[name] for name in own)) - fmean(math.log(times.seconds[name]) for name in usual)


def _cause(changes: Mapping[str, Interval], seconds: Mapping[str, Pair]) -> str:
    """Return the part that certainly changed in the direction of the whole, and by the most seconds."""
    sign = math.copysign(1.0, changes[WHOLE].middle)
    certain = [name for name, each in changes.items() if name != WHOLE and each.is_certain and sign * each.middle > 0]
    return max(certain, key=lambda name: abs(seconds[name][1] - seconds[name][0]), default="")
