"""The scaling study: throughput, speed-up, efficiency and time against workers, with ideal lines and the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from statistics import median

from lockstep.report.document import Cell, Chart, Line, Mark, Scale, Section, Table, filled_table
from lockstep.report.read.sources import Material
from lockstep.report.run_lines import ideal_line
from lockstep.scaling_model import LEVEL, MeasuredPoint, Model, Prediction, Series, fit, series_of
from lockstep.scaling_model.shape import listed

MODEL_REACH = 2  # the model is drawn up to this multiple of the largest measured count
MODEL_ERROR = 0.1  # largest relative error at which the model is drawn
FEWEST_COUNTS = 3  # distinct numbers of workers for a fit: any two points are fitted exactly
_MODES = {
    "strong": ("Strong scaling", "The global batch size is fixed and split among the workers."),
    "weak": ("Weak scaling", "The batch size per worker is fixed, so the global batch size grows."),
}
_WITHIN = f"{100 * MODEL_ERROR:g} %"
_SPREADS = {"points": "Whiskers (vertical lines)", "solid": "Bands"}
_RATE = "rate"  # placeholder for the format of the series' unit
_TABLE = (
    ("series", ""),
    ("workers", ",.0f"),
    ("nodes", ",.0f"),
    ("threads per worker", ",.0f"),
    ("throughput", _RATE),
    ("lower quartile", _RATE),
    ("upper quartile", _RATE),
    ("repeats", ",.0f"),
    ("speed-up", ".2f"),
    ("efficiency (%)", ".1f"),
    ("model error (%)", "+.1f"),
    ("predicted without this point", _RATE),
    ("error without it (%)", "+.1f"),
)
_FIGURES = {"images": "throughput", "trainings": "trainings"}  # by unit; of others, "throughput-" and the unit
_PARAMETERS = (("series", ""), ("parameter", ""), ("value", ".4g"), ("unit", ""), ("source", ""))


@dataclass(frozen=True)
class _Study:
    """A series with its color and its model, or the reason why it has no model."""

    series: Series
    model: Model | None
    reason: str
    color: int

    @property
    def base(self) -> MeasuredPoint:
        return self.series.points[0]

    @property
    def base_rate(self) -> float:
        """Throughput per worker at the smallest number of workers."""
        return self.base.images_per_second / self.base.workers

    @cached_property
    def fitting(self) -> dict[int, float]:
        """The model's error at counts where it fits, if it also fits an adjacent count; it is drawn between them."""
        errors = {error.workers: abs(error.relative_error) for error in self.model.errors} if self.model else {}
        pairs = [pair for pair in pairwise(errors) if all(errors[count] <= MODEL_ERROR for count in pair)]
        return {count: errors[count] for pair in pairs for count in pair}


def build(material: Material) -> tuple[list[Section], list[str]]:
    """Return a section for each measured mode, and warnings about skipped records."""
    series, warnings = series_of(material.of_kind("scaling"))
    studies = [_fitted(item, color) for color, item in enumerate(item for item in series if item.points)]
    sections = [_section(mode, [item for item in studies if item.series.mode == mode]) for mode in _MODES]
    return [section for section in sections if section], warnings


def _fitted(series: Series, color: int) -> _Study:
    if len(series.points) < FEWEST_COUNTS:
        return _Study(series, None, f"a fit needs at least {FEWEST_COUNTS} different numbers of workers", color)
    model = fit(series)
    if not model.times.spare_points:
        return _Study(series, None, "it has as many parameters as points; measure with more numbers of workers", color)
    return _Study(series, model, "", color)


def _section(mode: str, studies: Sequence[_Study]) -> Section | None:
    if not studies:
        return None
    title, about = _MODES[mode]
    lines = [about, *(f"{item.series.label}: {remark}" for item in studies for remark in _remarks(item))]
    parts = [*_rate_charts(mode, studies), *_ratio_charts(mode, studies), *_time_charts(mode, studies)]
    return Section(title, "\n".join(lines), [*parts, *_points(mode, studies), *_parameters(mode, studies)])


def _remarks(study: _Study) -> list[str]:
    source = [study.series.source] if study.series.source else []
    of_model = [*study.model.remarks, *_misfits(study)] if study.model else [f"no model: {study.reason}"]
    return [*source, *_single_repeats(study.series), *_different_threads(study.series), *of_model]


def _single_repeats(series: Series) -> list[str]:
    """Report points without a spread because they were measured only once."""
    once = [str(point.workers) for point in series.points if len(point.rates) == 1]
    if not once:
        return []
    where = "each number of workers" if len(once) == len(series.points) else f"{listed(once)} workers"
    more = "" if series.source or not series.job else '; use "--repeats 3" to measure the spread'
    return [f"measured only once with {where}, so the spread is unknown{more}"]


def _different_threads(series: Series) -> list[str]:
    """Report that the points compare not only numbers of workers."""
    threads = {point.workers: point.threads for point in series.points if point.threads}
    if len(set(threads.values())) < 2:
        return []
    counts = listed(f"{count} with {workers} worker{'s' if workers > 1 else ''}" for workers, count in threads.items())
    return [
        f"the number of threads per worker differs ({counts}), so the efficiency compares threads, too; use the same"
    ]


def _misfits(study: _Study) -> list[str]:
    """Report where the model is not drawn because it does not fit."""
    errors = study.model.errors if study.model else []
    missed = [str(error.workers) for error in errors if abs(error.relative_error) > MODEL_ERROR]
    if not study.fitting:
        return [f"no model is drawn: it does not fit any two consecutive points within {_WITHIN}"]
    drawn = f"the model is drawn only where it fits the points within {_WITHIN}"
    return [f"{drawn}; it does not at {listed(missed)} workers"] if missed else []


def _chart(
    mode: str, key: str, title: str, label: str, lines: Sequence[Line], note: str, marks: Sequence[Mark]
) -> Chart:
    title = f"{_MODES[mode][0]}: {title}"
    scale: Scale = "linear" if key == "efficiency" else "log10"
    return Chart(f"scaling-{mode}-{key}", title, "workers", label, lines, "log2", scale, marks, note)


def _rate_charts(mode: str, studies: Sequence[_Study]) -> list[Chart]:
    charts = []
    for (unit, key, title), found in _by_unit(studies).items():
        models = [line for item in found for line in _model_line(item, _no_factor)]
        lines = [_measured_line(item, _no_factor) for item in found]
        lines += [*models, *(line for item in found for line in _ideal(item, len(found)))]
        note = _note("Medians of the repeats. Ideal: the throughput per worker of the smallest count.", lines)
        charts.append(_chart(mode, key, title, f"throughput ({unit})", lines, note, _marks(found)))
    return charts


def _by_unit(studies: Sequence[_Study]) -> dict[tuple[str, str, str], list[_Study]]:
    """Return the studies of each unit, under the unit and the key and title of its figures."""
    found: dict[tuple[str, str, str], list[_Study]] = {}
    for study in studies:
        unit = study.series.rate_unit
        noun = unit.removesuffix("/s")
        key = _FIGURES.get(noun, f"throughput-{noun.replace(' ', '-')}")
        found.setdefault((unit, key, "throughput" if key == "throughput" else f"{noun} per second"), []).append(study)
    return found


def _no_factor(study: _Study, workers: int) -> float:
    return 1.0


def _note(about: str, lines: Sequence[Line]) -> str:
    """Return a chart's note, with sentences on its spreads and its model if it has them."""
    notes = [about]
    looks = {line.look for line in lines if _has_band(line)}
    if spreads := [name for look, name in _SPREADS.items() if look in looks]:
        notes.append(f"{' and '.join(spreads)} show the quartiles of the repeats.")
    models = [line for line in lines if line.remark]
    if models:
        band = f", with the {LEVEL:.0%} prediction interval as a band" if any(map(_has_band, models)) else ""
        notes.append(
            f"Model: fitted to the points{band}. It is drawn where it fits the points within {_WITHIN} and, beyond "
            "them, where it has an interval. The number next to the line (±) is its largest error."
        )
    return " ".join(notes)


def _has_band(line: Line) -> bool:
    return any(low is not None for low in line.low or ())


def _ratio_charts(mode: str, studies: Sequence[_Study]) -> list[Chart]:
    speedup = [line for item in studies for line in _lines(item, lambda study, workers: 1 / study.base_rate)]
    share = [
        line for item in studies for line in _lines(item, lambda study, workers: 100 / (study.base_rate * workers))
    ]
    x = sorted({point.workers for item in studies for point in item.series.points})
    speedup.append(Line("ideal", x, x, look="dotted", color=None))
    share.append(Line("ideal", x, [100] * len(x), look="dotted", color=None))
    start, marks = "the throughput per worker at the smallest measured count", _marks(studies)
    whole = _note(f"Throughput divided by {start}.", speedup)
    each = _note(f"Throughput per worker divided by {start}.", share)
    return [
        _chart(mode, "speedup", "speed-up", "speed-up", speedup, whole, marks),
        _chart(mode, "efficiency", "efficiency", "efficiency (%)", share, each, marks),
    ]


def _lines(study: _Study, factor: Callable[[_Study, int], float]) -> list[Line]:
    """Return the lines of the measured points and the model, with each throughput multiplied by `factor`."""
    return [_measured_line(study, factor), *_model_line(study, factor)]


def _measured_line(study: _Study, factor: Callable[[_Study, int], float]) -> Line:
    points, label, color = study.series.points, study.series.label, study.color
    x = [point.workers for point in points]
    factors = [factor(study, count) for count in x]

    def scaled(values: Sequence[float | None]) -> list[float | None]:
        return [None if value is None else value * times for value, times in zip(values, factors, strict=True)]

    lows, highs = zip(*map(_quartiles, points), strict=True)
    is_spread = any(low is not None for low in lows)
    return Line(
        label,
        x,
        scaled([point.images_per_second for point in points]),
        scaled(lows) if is_spread else None,
        scaled(highs) if is_spread else None,
        look="points" if study.fitting else "solid",
        color=color,
    )


def _quartiles(point: MeasuredPoint) -> tuple[float | None, float | None]:
    """Return the lower and upper quartiles of the repeats, or None if there is only one."""
    return (point.low, point.high) if len(point.rates) > 1 else (None, None)


def _ideal(study: _Study, studies: int) -> list[Line]:
    x = [point.workers for point in study.series.points]
    y = [study.base_rate * count for count in x]
    return [ideal_line(study.series.label, x, y, study.color if studies > 1 else None)] if len(x) > 1 else []


def _model_line(study: _Study, factor: Callable[[_Study, int], float]) -> list[Line]:
    if study.model is None or not study.fitting:
        return []
    found = [study.model.predict(count) for count in _counts(study.series)]
    shown = [(item, factor(study, item.workers) if _is_drawn(study, item) else None) for item in found]
    while shown[-1][1] is None:
        shown.pop()
    return [
        Line(
            f"model, {study.series.label}",
            [item.workers for item, _ in shown],
            [item.images_per_second * times if times else None for item, times in shown],
            [item.low * times if times and item.low else None for item, times in shown],
            [item.high * times if times and item.high else None for item, times in shown],
            look="dashed",
            color=study.color,
            remark=f"±{100 * max(study.fitting.values()):.2g} %",
        )
    ]


def _is_drawn(study: _Study, item: Prediction) -> bool:
    """Whether the model fits the measured counts on both sides or, beyond the last count, has an interval."""
    measured = [point.workers for point in study.series.points]
    below = [count for count in measured if count <= item.workers][-1:]
    above = [count for count in measured if count >= item.workers][:1]
    return all(count in study.fitting for count in (*below, *above)) and (bool(above) or item.low is not None)


def _counts(series: Series) -> list[int]:
    """Return the counts at which to draw the model: measured ones, doublings and midpoints, up to MODEL_REACH."""
    first, last = series.points[0].workers, series.points[-1].workers * MODEL_REACH
    counts = {point.workers for point in series.points} | {last}
    while first < last:
        counts |= {first, first * 3 // 2}
        first *= 2
    return sorted(count for count in counts if count <= last)


def _marks(studies: Sequence[_Study]) -> list[Mark]:
    """Mark the knees and the largest count on one node."""
    knees = {item.model.knee.workers: item for item in studies if item.model and item.model.knee}
    marks = [Mark(workers, f"knee at {workers} workers") for workers in sorted(knees)]
    for item in studies:
        alone = [point.workers for point in item.series.points if point.nodes == 1]
        if alone and alone[-1] not in knees and any((point.nodes or 0) > 1 for point in item.series.points):
            marks.append(Mark(alone[-1], f"one node up to {alone[-1]} workers"))
    return list({mark.x: mark for mark in marks}.values())


def _time_charts(mode: str, studies: Sequence[_Study]) -> list[Chart]:
    kinds = (
        ("epoch", "time per epoch", _epochs, "The number of training samples divided by each repeat's throughput."),
        ("training", "training time", _trainings, "The recorded time of the whole training."),
    )
    charts = []
    for key, label, times, note in kinds:
        several = sum(any(map(times, item.series.points)) for item in studies) > 1
        lines = [line for item in studies for line in _time_lines(item, times, several)]
        if lines:
            bands = "; bands show the full range" if any(map(_has_band, lines)) else ""
            note = f"{note} Medians{bands}."
            charts.append(_chart(mode, key, label, f"{label} (s)", lines, note, _marks(studies)))
    return charts


def _epochs(point: MeasuredPoint) -> Sequence[float]:
    return point.epoch_seconds


def _trainings(point: MeasuredPoint) -> Sequence[float]:
    return point.seconds


def _time_lines(study: _Study, times_of: Callable[[MeasuredPoint], Sequence[float]], several: bool) -> list[Line]:
    known = {point.workers: times for point in study.series.points if (times := times_of(point))}
    if not known:
        return []
    x = list(known)
    middle = [median(times) for times in known.values()]
    is_spread = any(len(times) > 1 for times in known.values())
    low = [min(times) for times in known.values()] if is_spread else None
    high = [max(times) for times in known.values()] if is_spread else None
    ideal = [middle[0] * x[0] / count for count in x]
    return [
        Line(study.series.label, x, middle, low, high, color=study.color),
        ideal_line(study.series.label, x, ideal, study.color if several else None),
    ]


def _points(mode: str, studies: Sequence[_Study]) -> list[Table]:
    tables = []
    for (unit, key, title), found in _by_unit(studies).items():
        rate = ",.1f" if min(point.images_per_second for item in found for point in item.series.points) >= 1 else ".4g"
        columns = [(name, rate if spec == _RATE else spec) for name, spec in _TABLE]
        title = f"{_MODES[mode][0]}: {title}, measured points"
        note = f"Throughput in {unit}."
        if any(item.model for item in studies):
            note += " Model error: fitted to all points; in the last two columns, fitted to the other points only."
        rows = [row for item in found for row in _rows(item)]
        tables.append(filled_table(f"scaling-{mode}-{key}-points", title, columns, rows, note))
    return tables


def _rows(study: _Study) -> list[list[Cell]]:
    errors = {error.workers: error for error in study.model.leave_one_out} if study.model else {}
    own = {error.workers: error for error in study.model.errors} if study.model else {}
    rows: list[list[Cell]] = []
    for point in study.series.points:
        speedup, error = point.images_per_second / study.base_rate, errors.get(point.workers)
        rows.append(
            [
                study.series.label,
                point.workers,
                point.nodes,
                point.threads,
                point.images_per_second,
                *_quartiles(point),
                len(point.rates),
                speedup,
                100 * speedup / point.workers,
                100 * own[point.workers].relative_error if own else None,
                error.predicted if error else None,
                100 * error.relative_error if error else None,
            ]
        )
    return rows


def _parameters(mode: str, studies: Sequence[_Study]) -> list[Table]:
    rows: list[list[Cell]] = [
        [item.series.label, *parameter] for item in studies if item.model for parameter in item.model.parameters
    ]
    note = "For the model's formula, see docs/howto/studies.md."
    title = f"{_MODES[mode][0]}: model parameters"
    return [filled_table(f"scaling-{mode}-model", title, _PARAMETERS, rows, note)] if rows else []
