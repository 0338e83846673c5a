"""The scaling study: a table, and throughput, speed-up, efficiency and the time of a step against workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lockstep.diagnosis.phases import STEP_PARTS
from lockstep.energy.counters import KINDS
from lockstep.errors import plural
from lockstep.files.metric_records import JOULES_PER_KWH
from lockstep.report.document import Bars, Cell, Chart, Line, Scale, Section, Table, filled_table
from lockstep.report.scaling_model import LEVEL, MIN_COUNTS, Model, fit, listed
from lockstep.report.scaling_series import MeasuredPoint, Series, cautions, efficiencies, judge

MODEL_ERROR = 0.1  # largest relative error at a point at which the model is drawn
MODEL_REACH = 2  # the model is drawn up to this multiple of the largest measured count
LOGARITHMIC_FROM = 16  # workers
VISIBLE = 0.005  # share of the longest step: smaller parts are thinner than a line
_MODES = {
    "strong": ("Strong scaling", "The global batch size is fixed and split among the workers."),
    "weak": ("Weak scaling", "The batch size per worker is fixed, so the global batch size grows."),
}
_RATE = "rate"  # placeholder for the format of the series' unit
_TABLE = (
    ("series", ""),
    ("workers", ",.0f"),
    ("nodes", ",.0f"),
    ("threads per worker", ",.0f"),
    ("throughput", _RATE),
    ("quartiles", ">"),
    ("speed-up", ".2f"),
    ("efficiency (%)", ".1f"),
    ("time per step (ms)", ",.2f"),
    ("quartiles (ms)", ">"),
    ("data (ms)", ",.2f"),
    ("exchange (ms)", ",.2f"),
    ("utilization (%)", ".0f"),
    ("peak memory (GB)", ",.3g"),
)


_COSTS = (
    *_TABLE[:3],
    ("global batch", ",.4g"),
    ("batch per worker", ",.4g"),
    ("time (h)", ",.4g"),
    ("node-hours", ",.4g"),
    ("power (W)", ",.0f"),
    ("energy (kWh)", ",.4g"),
    ("energy per sample (J)", ",.4g"),
    ("CO2e (g)", ",.4g"),
)


class Costs(NamedTuple):
    """The number of samples in tables of costs, and grams of CO2 equivalents per kWh."""

    samples: int = 1_000_000
    carbon: float | None = None


@dataclass(frozen=True)
class _Study:
    """A series with its color, its name in legends, and its model if there are enough points."""

    series: Series
    model: Model | None
    color: int
    name: str

    @property
    def curve(self) -> Model | None:
        """The model if it is drawn."""
        return self.model if self.model and self.model.largest_error <= MODEL_ERROR else None

    def named(self, text: str) -> str:
        """Return a text about this series, with its name if the section has several."""
        return f"{self.name}: {text}" if self.name else text

    def line_name(self, kind: str = "") -> str:
        """Return the name of the measured line, or of another kind of line."""
        return ", ".join(filter(None, (kind, self.name))) or "measured"


def build(series: Sequence[Series], threshold: float, costs: Costs) -> list[Section]:
    """Return a section for each measured mode."""
    sections = []
    for mode in _MODES:
        found = [item for item in series if item.mode == mode]
        studies = [
            _Study(
                item, fit(item) if len(item.points) >= MIN_COUNTS else None, color, item.label if len(found) > 1 else ""
            )
            for color, item in enumerate(found)
        ]
        if studies:
            sections.append(_section(mode, studies, threshold, costs))
    return sections


def _section(mode: str, studies: Sequence[_Study], threshold: float, costs: Costs) -> Section:
    title, about = _MODES[mode]
    charts = [*_rate_charts(mode, studies), *_ratio_charts(mode, studies, threshold)]
    parts: list[Chart | Bars | Table] = [*_tables(mode, studies, costs), *charts, *_bars(mode, studies)]
    lines = [
        *(item.named(verdict) for item in studies if (verdict := judge(item.series.points, threshold))),
        *(item.named(caution) for item in studies for caution in cautions(mode, item.series.points)),
        " ".join([about, *_explain(studies, charts)]),
        *(item.named(remark) for item in studies for remark in _remarks(item)),
    ]
    return Section(title, "\n".join(lines), parts)


def _explain(studies: Sequence[_Study], charts: Sequence[Chart]) -> list[str]:
    lines = [line for chart in charts for line in chart.lines]
    found = ["Efficiency and speed-up are relative to the throughput per worker at the smallest number of workers."]
    measured = {line.spread for line in lines if line.look != "dashed"} - {""}
    if measured:
        found.append(f"{' and '.join(sorted(measured))} show the quartiles of the repeats.".capitalize())
    models = [line for line in lines if line.remark]
    if models:
        band = f", with its {LEVEL:.0%} prediction interval" if any(line.spread for line in models) else ""
        found.append(f"The model is fitted to the points{band}; ± is its largest error at a point.")
    if any(chart.x_scale != "linear" for chart in charts):
        found.append("All axes but that of efficiency are logarithmic.")
    return found


def _remarks(study: _Study) -> list[str]:
    series = study.series
    source = [series.source] if series.source else []
    of_model = study.model.remarks if study.model else []
    if study.model is None:
        of_model = [f"no model: a fit needs at least {MIN_COUNTS} different numbers of workers"]
    elif study.curve is None:
        of_model = [f"no model is drawn: its largest error is {100 * study.model.largest_error:.2g} %", *of_model]
    unread = [f"energy that is not counted: {line}" for line in series.unread]
    return [*source, *unread, *_single_repeats(series), *_different_threads(series), *of_model]


def _single_repeats(series: Series) -> list[str]:
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


def _chart(mode: str, key: str, title: str, label: str, studies: Sequence[_Study], lines: Sequence[Line]) -> Chart:
    is_log = max(item.series.points[-1].workers for item in studies) >= LOGARITHMIC_FROM
    y_scale: Scale = "log10" if is_log and key != "efficiency" else "linear"
    return Chart(
        f"scaling-{mode}-{key}",
        f"{_MODES[mode][0]}: {title}",
        "workers",
        label,
        lines,
        "log2" if is_log else "linear",
        y_scale,
        from_zero=True,
        is_small=True,
    )


def _rate_charts(mode: str, studies: Sequence[_Study]) -> list[Chart]:
    charts = []
    for (unit, key), found in _by_unit(studies).items():
        lines = [line for item in found for line in _lines(item, lambda study, workers: 1.0)]
        lines += [_ideal(item, len(found)) for item in found if len(item.series.points) > 1]
        charts.append(_chart(mode, key, "throughput", f"throughput ({unit})", studies, lines))
    return charts


def _by_unit(studies: Sequence[_Study]) -> dict[tuple[str, str], list[_Study]]:
    """Return the studies of each unit, under the unit and the key of its figures."""
    found: dict[tuple[str, str], list[_Study]] = {}
    for study in studies:
        unit = study.series.rate_unit
        noun = unit.removesuffix("/s")
        key = "throughput" if noun == "images" else f"throughput-{noun.replace(' ', '-')}"
        found.setdefault((unit, key), []).append(study)
    return found


def _ratio_charts(mode: str, studies: Sequence[_Study], threshold: float) -> list[Chart]:
    speedup = [line for item in studies for line in _lines(item, lambda study, workers: 1 / study.series.base_rate)]
    share = [
        line
        for item in studies
        for line in _lines(item, lambda study, workers: 100 / (study.series.base_rate * workers))
    ]
    x = sorted({workers for line in share for workers in line.x})
    if len(x) == 1:
        return []
    speedup.append(Line("ideal", x, x, look="dotted", color=None))
    share.append(Line("ideal", x, [100] * len(x), look="dotted", color=None))
    share.append(Line("threshold", x, [100 * threshold] * len(x), look="dashed", color=None))
    return [
        _chart(mode, "speedup", "speed-up", "speed-up", studies, speedup),
        _chart(mode, "efficiency", "efficiency", "efficiency (%)", studies, share),
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
        study.line_name(),
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


def _ideal(study: _Study, studies: int) -> Line:
    x = [point.workers for point in study.series.points]
    x += [_counts(study.series)[-1]] if study.curve else []
    y = [study.series.base_rate * count for count in x]
    color = study.color if studies > 1 else None
    return Line(study.line_name("ideal"), x, y, look="dotted", color=color, is_ideal=True)


def _model_line(study: _Study, factor: Callable[[_Study, int], float]) -> list[Line]:
    if study.curve is None:
        return []
    measured = study.series.points[-1].workers
    predictions = [study.curve.predict(count) for count in _counts(study.series)]
    found = [item for item in predictions if item.workers <= measured or item.low]
    factors = [factor(study, item.workers) for item in found]
    return [
        Line(
            study.line_name("model"),
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


def _bars(mode: str, studies: Sequence[_Study]) -> list[Bars]:
    measured = [item for item in studies if _has_parts([item])]
    return [_split(mode, item, f"-{index}" if index > 1 else "") for index, item in enumerate(measured, start=1)]


def _split(mode: str, study: _Study, suffix: str) -> Bars:
    points = [point for point in study.series.points if point.split]
    names = list(dict.fromkeys([*STEP_PARTS, *(name for point in points for name in point.split or {})]))
    stacks = {
        index: (
            STEP_PARTS[name].name if name in STEP_PARTS else name,
            [1e3 * (point.split or {}).get(name, 0.0) for point in points],
        )
        for index, name in enumerate(names)
    }
    most = max(sum(values) for values in zip(*(values for _, values in stacks.values()), strict=True))
    shown = {index: stack for index, stack in stacks.items() if max(stack[1]) >= VISIBLE * most > 0}
    return Bars(
        f"scaling-{mode}-split{suffix}",
        ", ".join(filter(None, (f"{_MODES[mode][0]}: time of a step", study.name))),
        "workers",
        "mean time per step (ms)",
        [f"{point.workers:,}" for point in points],
        list(shown.values()),
        colors=list(shown),
        is_small=True,
    )


def _has_parts(studies: Sequence[_Study]) -> bool:
    return any(point.split for item in studies for point in item.series.points)


def _tables(mode: str, studies: Sequence[_Study], costs: Costs) -> list[Table]:
    tables = []
    for (unit, key), found in _by_unit(studies).items():
        rate = ",.1f" if min(point.images_per_second for item in found for point in item.series.points) >= 1 else ".4g"
        columns = [(name, rate if spec == _RATE else spec) for name, spec in _TABLE]
        title = f"{_MODES[mode][0]}: measured points ({unit})"
        repeats = sorted({len(point.rates) for item in found for point in item.series.points})
        times = plural(f"{repeats[0]} to {repeats[-1]}" if len(repeats) > 1 else repeats[0], "time")
        note = f"Throughput in {unit}, measured {times} with each number of workers."
        note = f"{_about(found[0].series)}. {note}" if len(studies) == 1 else note
        note += " Times of a step are means, beside the quartiles of the steps." if _has_parts(found) else ""
        rows = [_row(item, point, rate) for item in found for point in item.series.points]
        tables.append(filled_table(f"scaling-{mode}-{key}-points", title, columns, rows, note))
        kinds = {kind for item in found for point in item.series.points for kind in point.watts}
        counted = " and ".join(name for kind, name in KINDS.items() if kind in kinds)
        title = f"{_MODES[mode][0]}: cost of {costs.samples:,} {unit.removesuffix('/s')}"
        note = "At the throughput above, for whole nodes."
        note += f" Energy is that of {counted}." if counted else ""
        note += f" CO2e at {costs.carbon:g} g/kWh." if counted and costs.carbon is not None else ""
        rows = [_costs(item, point, costs) for item in found for point in item.series.points]
        tables.append(filled_table(f"scaling-{mode}-{key}-costs", title, _COSTS, rows, note))
    return tables


def _about(series: Series) -> str:
    return f"{series.label}. Computed on {series.device}" if series.device else series.label


def _costs(study: _Study, point: MeasuredPoint, costs: Costs) -> list[Cell]:
    hours = costs.samples / point.images_per_second / 3600
    joules = study.series.joules_per_sample(point)
    energy = joules and joules * costs.samples / JOULES_PER_KWH
    return [
        study.name or None,
        point.workers,
        point.nodes,
        batch := point.samples_per_step or point.global_batch,
        batch and batch / point.workers,
        hours,
        point.nodes and hours * point.nodes,
        joules and joules * point.images_per_second,
        energy,
        joules,
        energy and costs.carbon and energy * costs.carbon,
    ]


def _row(study: _Study, point: MeasuredPoint, rate: str) -> list[Cell]:
    times = point.step_seconds[0], point.mean_step_seconds, point.step_seconds[2]
    low, mean, high = (None if step is None else 1e3 * step for step in times)
    split = point.split or {}
    waits = (1e3 * split[name] if name in split else None for name in ("data_wait", "communication_exposed"))
    return [
        study.name or None,
        point.workers,
        point.nodes,
        point.threads,
        point.images_per_second,
        _range(*_quartiles(point), rate),
        point.images_per_second / study.series.base_rate,
        100 * efficiencies(study.series.points)[point.workers],
        mean,
        _range(low, high, ",.2f"),
        *waits,
        None if point.utilization is None else 100 * point.utilization,
        None if point.peak_memory_bytes is None else point.peak_memory_bytes / 1e9,
    ]


def _range(low: float | None, high: float | None, spec: str) -> str | None:
    return None if low is None or high is None else f"{low:{spec}}–{high:{spec}}"
