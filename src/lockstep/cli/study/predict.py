"""`lockstep study predict`: fit the scaling model to recorded points, and predict larger numbers of workers."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from rich.table import Table

from lockstep.cli.json_output import print_json
from lockstep.cli.parse import parse
from lockstep.cli.study import empty_table, parse_counts
from lockstep.config.flags import Positional, arg
from lockstep.errors import ConfigError, DataError, LockstepError
from lockstep.files.jsonl import read_records
from lockstep.report.scaling_model import LEVEL, TERMS, Model, Prediction, fit
from lockstep.report.scaling_series import MeasuredPoint, Series, cautions, series_of

DEFAULT_FILE = Path("study/scaling.jsonl")


@dataclass(frozen=True)
class StudyPredictCommand:
    """Predict the throughput on more workers from the records of `lockstep study scaling`.

    Each series (a job, with strong or weak scaling) is fitted separately.
    """

    files: Annotated[Positional[tuple[Path, ...]], arg(metavar="FILE.jsonl")] = ()
    """Files of scaling records. Default: study/scaling.jsonl."""
    counts: Annotated[str, arg(name="np", aliases=["-np"], metavar="N,N,...")] = ""
    """Numbers of workers to predict. Default: 2, 4 and 8 times the largest measured."""
    only: Annotated[str, arg(name="from", metavar="N,N,...")] = ""
    """Numbers of workers to fit to; the others check the fit. Default: all."""
    json: bool = False
    """Print the results as JSON."""


def main(arguments: Sequence[str]) -> int:
    command = parse(StudyPredictCommand, "study predict", arguments)
    counts = sorted(set(parse_counts("--np", command.counts))) if command.counts else []
    only = parse_counts("--from", command.only) if command.only else []
    records = [record for path in command.files or (DEFAULT_FILE,) for record in _read(path)]
    found, warnings = series_of(records)
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)
    models = list(_fit(found, only))
    if not models:
        raise DataError("no series can be fitted; see the lines above")
    series = [_show(Console(), model, counts) for model in models]
    if command.json:
        print_json({"series": series})
    return 0


def _read(path: Path) -> list[dict[str, Any]]:
    """Return the scaling records of a file.

    Raises:
        ConfigError: The file cannot be read.
        DataError: The file has no scaling records.
    """
    try:
        records = [record for record in read_records(path) if record.get("kind") == "scaling"]
    except FileNotFoundError:
        raise ConfigError(
            f"{path} does not exist; create it with `lockstep study scaling`, or choose another FILE"
        ) from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; choose another FILE") from None
    if not records:
        raise DataError(f"{path} has no scaling records; create them with `lockstep study scaling`")
    return records


def _fit(found: Iterable[Series], only: Sequence[int]) -> Iterable[Model]:
    """Yield the models of the series that can be fitted; for the others, print why not."""
    for series in found:
        try:
            yield fit(series, only)
        except LockstepError as error:
            print(f"not fitted: {error}", file=sys.stderr)


def _show(console: Console, model: Model, counts: Sequence[int]) -> dict[str, Any]:
    """Print a model and its predictions, and return them for `--json`."""
    series = model.series
    larger = [factor * series.points[-1].workers for factor in (2, 4, 8)]
    predictions = [model.predict(workers) for workers in counts or larger]
    table, rows = _points(model, predictions)
    source = f"; {series.source}" if series.source else ""
    title = f"{series.label} ({series.mode} scaling{source})"
    console.print(title, style="bold", markup=False, highlight=False, soft_wrap=True)
    console.print(table)
    terms = ", ".join(f"{name} {value:.4g}" for name, value in zip(TERMS, model.terms, strict=True))
    lines = [f"fitted terms ({model.unit}): {terms}", *_notes(predictions), *model.remarks]
    lines += cautions(series.mode, series.points)
    for line in lines:
        console.print(f"- {line}", highlight=False, soft_wrap=True)
    console.print()
    return {"label": series.label, "mode": series.mode, "rows": rows, "verdict": lines}


def _points(model: Model, predictions: Sequence[Prediction]) -> tuple[Table, list[dict[str, Any]]]:
    """Return the measured and predicted points as a table, and for `--json`."""
    series, name, rows = model.series, model.series.rate_name, list[dict[str, Any]]()
    interval = f"{100 * LEVEL:g} % interval"
    table = empty_table("", ("workers", f"measured {series.rate_unit}", "model", interval, "error", "efficiency"))
    measured = {point.workers: point for point in series.points}
    predicted = {prediction.workers: prediction for prediction in predictions}
    for workers in sorted(measured.keys() | predicted.keys()):
        prediction = predicted.get(workers) or model.predict(workers)
        point, (_, rate, low, high, *_) = measured.get(workers), prediction
        efficiency = point.images_per_second / workers / series.base_rate if point else prediction.efficiency
        error = rate / point.images_per_second - 1 if point else None
        table.add_row(
            str(workers),
            _measured(point) if point else "",
            _amount(rate),
            _range(low, high) if low and high else "-",
            "" if error is None else f"{100 * error:+.1f} %",
            f"{efficiency:.2f}" if efficiency >= 0.1 else f"{efficiency:.2g}",
            style="" if point else "bold",
        )
        row = {"workers": workers, f"measured_{name}": point and point.images_per_second, name: rate}
        rows.append({**row, f"low_{name}": low, f"high_{name}": high, "error": error, "efficiency": efficiency})
    return table, rows


def _amount(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 1000 else f"{rate:.4g}"


def _measured(point: MeasuredPoint) -> str:
    middle = _amount(point.images_per_second)
    return middle if len(point.rates) < 2 else f"{middle} ({_range(point.low, point.high)})"


def _range(low: float, high: float) -> str:
    return f"{_amount(low)} to {_amount(high)}"


def _notes(predictions: Sequence[Prediction]) -> list[str]:
    """Return the reasons for predictions without an interval, each with its numbers of workers."""
    reasons = dict.fromkeys(prediction.note for prediction in predictions if prediction.note)
    named = {note: [str(p.workers) for p in predictions if p.note == note] for note in reasons}
    return [f"prediction for {', '.join(counts)} workers: {note}" for note, counts in named.items()]
