"""The scaling study: throughput, speed-up, efficiency and time against workers, with ideal lines and the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from lockstep.errors import plural
from lockstep.report.document import Cell, Chart, Line, Scale, Section, Table, filled_table
from lockstep.report.read.sources import Material
from lockstep.report.run_lines import ideal_line
from lockstep.report.scaling_model import LEVEL, MIN_COUNTS, Model, fit, listed
from lockstep.report.scaling_series import MeasuredPoint, Series, series_of

MODEL_ERROR = 0.1  # largest relative error at a point at which the model is drawn
MODEL_REACH = 2  # the model is drawn up to this multiple of the largest measured count
_MODES = {
    "strong": ("Strong scaling", "The global batch size is fixed and split among the workers."),
    "weak": ("Weak scaling", "The batch size per worker is fixed, so the global batch size grows."),
}
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
)
_FIGURES = {"images": "throughput", "trainings": "trainings"}  # by unit; of others, "throughput-" and the unit


@dataclass(frozen=True)
class _Study:
    """A series with its color, and its model if there are enough points."""

    series: Series
    model: Model | None
    color: int

    @property
    def curve(self) -> Model | None:
        """The model if it is drawn."""
        return self.model if self.model and self.model.largest_error <= MODEL_ERROR else None

    @property
    def base_rate(self) -> float:
        """Throughput per worker at the smallest number of workers."""
        return self.series.points[0].images_per_second / self.series.points[0].workers


def build(material: Material) -> tuple[list[Section], list[str]]:
    """Return a section for each measured mode, and warnings about skipped records."""
    series, warnings = series_of(material.of_kind("scaling"))
    studies = [
        _Study(item, fit(item) if len(item.points) >= MIN_COUNTS else None, color) for color, item in enumerate(series)
    ]
    sections = [_section(mode, [item for item in studies if item.series.mode == mode]) for mode in _MODES]
    return [section for section in sections if section], warnings


def _section(mode: str, studies: Sequence[_Study]) -> Section | None:
    if not studies:
        return None
    title, about = _MODES[mode]
    lines = [about, *(f"{item.series.label}: {remark}" for item in studies for remark in _remarks(item))]
    parts = [*_rate_charts(mode, studies), *_ratio_charts(mode, studies), *_time_charts(mode, studies)]
    return Section(title, "\n".join(lines), [*parts, *_points(mode, studies)])


def _remarks(study: _Study) -> list[str]:
    series = study.series
    source = [series.source] if series.source else []
    of_model = study.model.remarks if study.model else []
    if study.model is None:
        of_model = [f"no model: a fit needs at least {MIN_COUNTS} different numbers of workers"]
    elif study.curve is None:
        of_model = [f"no model is drawn: its largest error is {100 * study.model.largest_error:.2g} %", *of_model]
    return [*source, *_nodes(series), *_single_repeats(series), *_different_threads(series), *of_model]


def _nodes(series: Series) -> list[str]:
    """Report the largest count on one node."""
    alone = [point.workers for point in series.points if point.nodes == 1]
    has_more = any((point.nodes or 0) > 1 for point in series.points)
    return [f"one node up to {plural(alone[-1], 'worker')}"] if alone and has_more else []


def _single_repeats(series: Series) -> list[str]:
    """Report points without a spread because they were measured only once."""
    once = [point.workers for point in series.points if len(point.rates) == 1]
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
    counts = listed(f"{count} with {plural(workers, 'worker')}" for workers, count in threads.items())
    return [
        f"the number of threads per worker differs ({counts}), so the efficiency compares threads, too; use the same"
    ]


def _chart(mode: str, key: str, title: str, label: str, lines: Sequence[Line], note: str) -> Chart:
    title = f"{_MODES[mode][0]}: {title}"
    scale: Scale = "linear" if key == "efficiency" else "log10"
    return Chart(f"scaling-{mode}-{key}", title, "workers", label, lines, "log2", scale, note)


def _rate_charts(mode: str, studies: Sequence[_Study]) -> list[Chart]:
    charts = []
    for (unit, key, title), found in _by_unit(studies).items():
        models = [line for item in found for line in _model_line(item, _no_factor)]
        lines = [_measured_line(item, _no_factor) for item in found]
        lines += [*models, *(line for item in found for line in _ideal(item, len(found)))]
        note = _note("Medians of the repeats. Ideal: the throughput per worker of the smallest count.", lines)
        charts.append(_chart(mode, key, title, f"throughput ({unit})", lines, note))
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
            f"Model: fitted to the points{band}. The number after its name (±) is its largest error at a point."
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
    start = "the throughput per worker at the smallest measured count"
    whole = _note(f"Throughput divided by {start}.", speedup)
    each = _note(f"Throughput per worker divided by {start}.", share)
    return [
        _chart(mode, "speedup", "speed-up", "speed-up", speedup, whole),
        _chart(mode, "efficiency", "efficiency", "efficiency (%)", share, each),
    ]


def _lines(study: _Study, factor: Callable[[_Study, int], float]) -> list[Line]:
    """Return the lines of the measured points and the model, with each throughput multiplied by `factor`."""
    return [_measured_line(study, factor), *_model_line(study, factor)]


def _measured_line(study: _Study, factor: Callable[[_Study, int], float]) -> Line:
    points = study.series.points
    x = [point.workers for point in points]
    factors = [factor(study, count) for count in x]
    lows, highs = zip(*map(_quartiles, points), strict=True)
    is_spread = any(low is not None for low in lows)
    return Line(
        study.series.label,
        x,
        _scaled([point.images_per_second for point in points], factors),
        _scaled(lows, factors) if is_spread else None,
        _scaled(highs, factors) if is_spread else None,
        look="points" if study.curve else "solid",
        color=study.color,
    )


def _scaled(values: Sequence[float | None], factors: Sequence[float]) -> list[float | None]:
    return [None if value is None else value * factor for value, factor in zip(values, factors, strict=True)]


def _quartiles(point: MeasuredPoint) -> tuple[float | None, float | None]:
    """Return the lower and upper quartiles of the repeats, or None if there is only one."""
    return (point.low, point.high) if len(point.rates) > 1 else (None, None)


def _ideal(study: _Study, studies: int) -> list[Line]:
    x = [point.workers for point in study.series.points]
    y = [study.base_rate * count for count in x]
    return [ideal_line(study.series.label, x, y, study.color if studies > 1 else None)] if len(x) > 1 else []


def _model_line(study: _Study, factor: Callable[[_Study, int], float]) -> list[Line]:
    if study.curve is None:
        return []
    measured = study.series.points[-1].workers
    predictions = [study.curve.predict(count) for count in _counts(study.series)]
    found = [item for item in predictions if item.workers <= measured or item.low]
    factors = [factor(study, item.workers) for item in found]
    return [
        Line(
            f"model, {study.series.label}",
            [item.workers for item in found],
            _scaled([item.images_per_second for item in found], factors),
            _scaled([item.low for item in found], factors),
            _scaled([item.high for item in found], factors),
            look="dashed",
            color=study.color,
            remark=f"±{100 * study.curve.largest_error:.2g} %",
        )
    ]


def _counts(series: Series) -> list[int]:
    """Return the counts at which to draw the model: measured ones, doublings and midpoints, up to MODEL_REACH."""
    first, last = series.points[0].workers, series.points[-1].workers * MODEL_REACH
    counts = {point.workers for point in series.points} | {last}
    while first < last:
        counts |= {first, first * 3 // 2}
        first *= 2
    return sorted(count for count in counts if count <= last)


def _time_charts(mode: str, studies: Sequence[_Study]) -> list[Chart]:
    """Return the chart of recorded training times, if there are any."""
    known = [item for item in studies if any(point.seconds for point in item.series.points)]
    lines = [line for item in known for line in _time_lines(item, several=len(known) > 1)]
    if not lines:
        return []
    bands = "; bands show the full range" if any(map(_has_band, lines)) else ""
    note = f"The recorded time of the whole training. Medians{bands}."
    return [_chart(mode, "training", "training time", "training time (s)", lines, note)]


def _time_lines(study: _Study, several: bool) -> list[Line]:
    times = {point.workers: point.seconds for point in study.series.points if point.seconds}
    x = list(times)
    middle = [median(seconds) for seconds in times.values()]
    is_spread = any(len(seconds) > 1 for seconds in times.values())
    low = [min(seconds) for seconds in times.values()] if is_spread else None
    high = [max(seconds) for seconds in times.values()] if is_spread else None
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
        rows = [row for item in found for row in _rows(item)]
        tables.append(filled_table(f"scaling-{mode}-{key}-points", title, columns, rows, note))
    return tables


def _rows(study: _Study) -> list[list[Cell]]:
    errors = {error.workers: 100 * error.relative_error for error in study.model.errors} if study.model else {}
    rows: list[list[Cell]] = []
    for point in study.series.points:
        speedup = point.images_per_second / study.base_rate
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
                errors.get(point.workers),
            ]
        )
    return rows
