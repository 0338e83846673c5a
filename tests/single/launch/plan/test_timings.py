"""A job's times fit each other."""

from __future__ import annotations

from dataclasses import fields
from itertools import pairwise

import pytest

from lockstep.launch.plan.timings import ORDERS, Timings


@pytest.mark.parametrize("pair", [pair for names in ORDERS for pair in pairwise(names)])
def test_time_as_long_as_one_that_must_outlast_it_is_refused(pair: tuple[str, str]) -> None:
    shorter, longer = pair
    with pytest.raises(ValueError, match=r"must be (shorter|longer) than"):
        Timings(**{shorter: getattr(Timings(), longer)})


@pytest.mark.parametrize("name", [each.name for each in fields(Timings)])
@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan")])
def test_every_time_is_positive(name: str, seconds: float) -> None:
    with pytest.raises(ValueError, match=f"{name} must be positive"):
        Timings(**{name: seconds})


def test_launchers_caller_waits_longer_than_the_launcher() -> None:
    """It ends the workers, then by force, and then closes its node processes."""
    with pytest.raises(ValueError, match="caller_end must be longer"):
        Timings(caller_end=12.0)


def test_lost_hosts_workers_end_within_the_documented_time() -> None:
    usual = Timings()
    assert usual.silence + usual.worker_end + usual.settle < 15
