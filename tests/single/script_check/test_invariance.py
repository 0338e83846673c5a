"""When the first losses of several workers are those of one."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.script_check.answers import Record
from lockstep.script_check.invariance import judge_invariance

LOSSES = (2.0, 1.5, 1.1)
PARTS = ((2.2, 1.8), (1.4, 1.6), (1.2, 1.0))  # of two workers


def _records(losses: tuple[float, ...], samples: str, **other: Any) -> list[Record]:
    step = {"event": "step", "line": "train.py:9", "is_random": False, "has_batch_norm": False, "is_rounded": False}
    made = {"event": "optimizer", "names": ["weight"], "weights": ["1"], "has_wrapper": True, "sharded": [False]}
    changed = {name: value for name, value in other.items() if name in made}
    settings = [{"lr": other.get("rate", 0.1)}]
    steps = [{**step, "loss": loss, "inputs": list(samples), "settings": settings, **other} for loss in losses]
    return [made | changed, *steps]


def _judge(losses: tuple[float, ...] = LOSSES, parts: Any = PARTS, samples: str = "dbca", **other: Any) -> Any:
    """Compare one worker with two."""
    workers = {rank: _records(tuple(row[rank] for row in parts), "abcd"[2 * rank :][:2], **other) for rank in (0, 1)}
    return judge_invariance({0: _records(losses, samples)}, workers)


def _scaled(factor: float) -> Any:
    return [[factor * loss for loss in row] for row in PARTS]


def test_equal_losses_are_named_with_their_distance() -> None:
    answer = _judge((2.0, 1.5001, 1.1))
    assert (answer.verdict, answer.detail) == ("yes", "3 steps, at most 0.0001 apart")


def test_workers_may_each_have_a_part_of_the_mean() -> None:
    assert _judge(parts=_scaled(0.5), has_wrapper=False).verdict == "yes"
    assert _judge(parts=_scaled(0.5), has_wrapper=True).verdict == "no"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"losses": (4.0, 1.5, 1.1)}, "step 1 is 4 with one worker, 2 with 2"),
        ({"losses": (2.0, 1.5, 0.9)}, "step 3 is 0.9 with one worker, 1.1 with 2"),
    ],
)
def test_losses_that_are_apart_are_named(given: Any, words: str) -> None:
    answer = _judge(**given)
    assert answer.verdict == "no"
    assert words in answer.detail
    assert answer.where == "train.py:9"


@pytest.mark.parametrize(("is_rounded", "verdict"), [(True, "yes"), (False, "no")])
def test_losses_of_16_bits_may_be_further_apart(is_rounded: bool, verdict: str) -> None:
    alone = _records((100.5, 100.0, 100.0), "dbca", is_rounded=is_rounded)
    workers = {rank: _records((100.0,) * 3, samples) for rank, samples in enumerate(("ab", "cd"))}
    assert judge_invariance({0: alone}, workers).verdict == verdict


def test_a_setting_that_depends_on_the_workers_is_named() -> None:
    answer = _judge((2.0, 1.9, 1.8), rate=0.2)
    assert answer.fix == "lr is 0.1 with one worker and 0.2 with 2: let it depend on the global batch only"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"samples": "abce"}, "other samples"),
        ({"is_random": True}, "dropout"),
        ({"has_batch_norm": True}, "batch norm"),
        ({"loss": None}, "were not seen"),
        ({"weights": ["2"]}, "seed them"),
        ({"sharded": [True]}, "own part"),
    ],
)
def test_what_cannot_be_compared_is_not_judged(given: Any, words: str) -> None:
    answer = _judge((4.0, 3.0, 2.0), **given)
    assert answer.verdict == "not seen"
    assert words in answer.detail
