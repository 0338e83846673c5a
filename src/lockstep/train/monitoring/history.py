"""The results of a run's epochs as arrays, over all sessions of the run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep.files.atomic import replacing
from lockstep.files.jsonl import format_record, read_records
from lockstep.train.run_folder import RunFolder
from lockstep.world.world import World

Figures = Mapping[str, npt.NDArray[np.float64]]
_FIELDS = {
    **{name: name for name in ("epoch", "step", "loss", "top1", "top5", "samples", "images_per_second")},
    "epoch_seconds": "seconds",
}
"""Fields of records, and their names in `History`."""


class Plot:
    """Curves over epochs in panels, which notebooks display.

    Args:
        specification: The panels as a Vega-Lite specification.
    """

    def __init__(self, specification: Mapping[str, Any]) -> None:
        self.specification = specification

    def savefig(self, path: str | Path) -> None:
        """Write the plot to a .png, .svg or .pdf file.

        Raises:
            ValueError: The file name has another ending.
        """
        import vl_convert

        kind, svg = Path(path).suffix.lower(), self._repr_svg_()
        if kind == ".svg":
            content = svg.encode()
        elif kind in (".png", ".pdf"):
            content = vl_convert.svg_to_png(svg, scale=2) if kind == ".png" else vl_convert.svg_to_pdf(svg)
        else:
            raise ValueError(f"{path}: cannot write a plot in this format; choose .png, .svg or .pdf")
        with replacing(Path(path), shared=True) as partial:
            partial.write_bytes(content)

    def _repr_svg_(self) -> str:
        import vl_convert

        return vl_convert.vegalite_to_svg(dict(self.specification))


@dataclass(frozen=True)
class History:
    """Values per epoch, float64 [epochs]: epoch (from 1), step, loss, samples, seconds, with classes top1 and top5.

    Args:
        train: Values of training.
        val: Values of evaluations, including the metrics of `fit`. A metric with several values is [epochs, ...].
    """

    train: Figures
    val: Figures

    def plot(self, *metrics: str) -> Plot:
        """Plot loss, top-1 if targets are classes, and the named metrics over epochs, for training and validation.

        Returns:
            A plot. Notebooks display it; `savefig(path)` writes it to a .png, .svg or .pdf file.

        Raises:
            ValueError: A metric is unknown.
        """
        if unknown := [name for name in metrics if name not in self.val]:
            raise ValueError(f"unknown metric {unknown[0]!r}; choose from {', '.join(self.val)}")
        names = ("loss", *(["top1"] if "top1" in self.val else []), *metrics)
        panels = [self._panel(name, {"top1": "top-1"}.get(name, name)) for name in names]
        style = {"aria": False, "font": "Liberation Sans, Arial, sans-serif", "view": {"stroke": None}}
        return Plot(
            {"hconcat": panels, "resolve": {"scale": {"color": "shared"}}, "background": "white", "config": style}
        )

    def _panel(self, name: str, title: str) -> dict[str, Any]:
        """Return the curves of a metric, with several if it has several values."""
        splits = {"training": self.train, "validation": self.val}
        rows = [
            {"x": float(epoch), "y": float(value) if np.isfinite(value) else None, "split": split, "part": part}
            for split, figures in splits.items()
            if name in figures
            for epoch, values in zip(figures["epoch"], figures[name], strict=True)
            for part, value in enumerate(np.ravel(values))
        ]
        color = {"scale": {"domain": list(splits), "range": ["#0072b2", "#d55e00"]}, "legend": {"title": None}}
        y = {"field": "y", "type": "quantitative", "title": title, "scale": {"zero": False}}
        return {
            "width": 280,
            "height": 220,
            "data": {"values": rows},
            "mark": {"type": "line", "point": True},
            "encoding": {
                "x": {"field": "x", "type": "quantitative", "title": "epoch", "axis": {"tickMinStep": 1}},
                "y": y,
                "color": {"field": "split", "type": "nominal", **color},
                "detail": {"field": "part"},
            },
        }


class EpochRecords:
    """The records of all epochs so far, equal on all workers except for times, which each measures itself."""

    def __init__(self) -> None:
        self._records: list[Mapping[str, Any]] = []

    def extend(self, records: Iterable[Mapping[str, Any]]) -> None:
        for record in records:
            self.add(record)

    def add(self, record: Mapping[str, Any]) -> None:
        """Add a record, replacing records of the same and later epochs, which were interrupted or are repeated."""
        self._records = [
            old for old in self._records if old["split"] != record["split"] or old["epoch"] < record["epoch"]
        ]
        self._records.append(record)

    def history(self) -> History:
        return History(*(_arrays([r for r in self._records if r["split"] == split]) for split in ("train", "val")))


def read_epochs(folder: RunFolder, step: int, world: World, before: RunFolder | None = None) -> list[Mapping[str, Any]]:
    """Return the records of a run's epochs up to a step, which rank 0 reads from its folder. Collective.

    Args:
        before: Another folder that the run was resumed from; its records are copied into `folder`.
    """
    found = list[Mapping[str, Any]]()
    if world.is_main and step:
        if before is not None:
            found = _read(before, step)
            with suppress(OSError), replacing(folder.earlier) as partial:  # if the disk is full, memory has them
                partial.write_text("".join(f"{format_record(record)}\n" for record in found), encoding="utf-8")
        found += _read(folder, step)
    return list(world.from_main(found))


def _read(folder: RunFolder, step: int) -> list[Mapping[str, Any]]:
    records = list[Mapping[str, Any]]()
    for path in (folder.earlier, folder.metrics):
        with suppress(OSError):  # a new folder has none
            records += [r for r in read_records(path) if r.get("kind") == "epoch" and r["step"] <= step]
    return records


def _arrays(records: Sequence[Mapping[str, Any]]) -> Figures:
    known = [name for name in _FIELDS if not records or any(name in record for record in records)]
    figures = {_FIELDS[name]: _array([record.get(name) for record in records]) for name in known}
    metrics = {name: None for record in records for name in record.get("metrics", {})}  # in order
    return figures | {name: _array([r.get("metrics", {}).get(name) for r in records]) for name in metrics}


def _array(values: Sequence[Any]) -> npt.NDArray[np.float64]:
    """Return a row per value; NaN for values that are missing or None."""
    arrays = [np.array(np.nan if value is None else value, dtype=np.float64) for value in values]
    shape = max((array.shape for array in arrays), key=len, default=())
    rows = [array if array.shape == shape else np.full(shape, np.nan) for array in arrays]
    return np.stack(rows) if rows else np.zeros(0)
