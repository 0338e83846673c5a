"""Names for legends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lockstep.report.run import Run, describe_workers, distinct_names


def _run(name: str, config: dict[str, Any] | None = None, **start: Any) -> Run:
    return Run(Path("runs") / name, name, start, [start["workers"]] if "workers" in start else [], config=config or {})


@pytest.mark.parametrize(
    ("runs", "names"),
    [
        ([_run("first", workers=2)], ["first"]),
        (
            [_run(str(count), arch="resnet18", workers=count, global_batch=64 * count) for count in (1, 16)],
            ["1 worker, batch 64", "16 workers, batch 1,024"],
        ),
        (
            [_run(f"{count}-{seed}", {"seed": seed}, workers=count) for count, seed in ((1, 0), (2, 1), (2, 2))],
            ["1 worker", "2 workers, seed 1", "2 workers, seed 2"],
        ),
        ([_run("a"), _run("b")], ["a", "b"]),
        ([_run("a"), _run("a")], ["a (1)", "a (2)"]),
    ],
    ids=["alone", "only what differs", "the seed where nothing else differs", "folders", "equal folders"],
)
def test_names_have_what_distinguishes_runs(runs: list[Run], names: list[str]) -> None:
    assert distinct_names(runs) == names


def test_names_are_distinct_even_if_a_field_is_missing() -> None:
    names = distinct_names([_run("a", workers=2), _run("b"), _run("c", workers=4), _run("d", workers=4)])
    assert len(set(names)) == 4


@pytest.mark.parametrize(
    ("workers", "words"), [([1], "1 worker"), ([4, 4], "4 workers"), ([2, 4, 4, 2], "2 → 4 → 2 workers")]
)
def test_sessions_on_other_numbers_of_workers_are_named(workers: list[int], words: str) -> None:
    assert describe_workers(workers) == words
