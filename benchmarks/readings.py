"""Comparisons whose turns return figures, such as the seconds to an event or bytes of memory.

As in `harness.compare`, each contestant has one turn per round, in random order, the first round is a warm-up, and
ratios to the first contestant are computed within rounds. A turn may return several figures; each has its own table and
record.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import quantiles
from typing import Any

from harness import Bar, append_record, interleave, median_interval

Reading = Callable[[], Mapping[str, float]]  # runs one turn; returns its figures by name


def compare_readings(
    name: str,
    contestants: Mapping[str, Reading],
    bars: Mapping[tuple[str, str], Bar],
    unit: str | Mapping[str, str],
    rounds: int,
    warm_up: int = 1,
) -> None:
    """Measure; print a table and append a record for each figure.

    Args:
        name: "FILE: CASE"; the record appends the figure's name.
        bars: Bars by figure and contestant.
        unit: The unit of all figures, or units by figure.
        rounds: Number of rounds, at least 2.
    """
    taken = interleave(contestants, rounds, warm_up)
    base = next(iter(taken.values()))
    for figure in base[0]:
        label = unit if isinstance(unit, str) else unit[figure]
        print(f"\n{name}, {figure}: {label}, median (quartiles) of {rounds} rounds")
        rows: dict[str, Any] = {}
        for contestant, each in taken.items():
            figures = [turn[figure] for turn in each]
            ratios = [a / b[figure] for a, b in zip(figures, base, strict=True)]
            row: dict[str, Any] = {
                "turns": figures,
                "figure": quantiles(figures, method="inclusive"),
                "ratio": quantiles(ratios, method="inclusive"),
            }
            row["interval"] = median_interval(ratios)
            if bar := bars.get((figure, contestant)):
                row["bar"] = bar.verdict(row["ratio"][1], row["interval"])
            rows[contestant] = row
            print(f"  {contestant:28}{show(row['figure']):30}{show(row['ratio']):30}{row.get('bar', '')}".rstrip())
        append_record({"kind": "comparison", "name": f"{name}, {figure}", "unit": label, "contestants": rows})


def show(spread: list[float]) -> str:
    low, median, high = (f"{figure:.4g}" for figure in spread)
    return f"{median} ({low} to {high})"
