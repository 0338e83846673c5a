"""The forms of a time limit."""

from __future__ import annotations

import pytest

from lockstep.config.time_limit import TimeLeft, parse_time_limit
from lockstep.errors import ConfigError
from lockstep.train.fit import configure

MINUTE, HOUR, DAY = 60, 3600, 86400


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90 * MINUTE),
        ("0:20", 20),
        ("90:05", 90 * MINUTE + 5),
        ("1:30:00", 1.5 * HOUR),
        ("100:00:01", 100 * HOUR + 1),
        ("2-0", 2 * DAY),
        ("2-12", 2 * DAY + 12 * HOUR),
        ("1-02:03", DAY + 2 * HOUR + 3 * MINUTE),
        ("1-02:03:04", DAY + 2 * HOUR + 3 * MINUTE + 4),
        *((word, None) for word in ("none", "0", "0:00", "UNLIMITED")),
    ],
)
def test_slurms_forms_are_understood(text: str, seconds: float | None) -> None:
    assert parse_time_limit(text) == seconds
    assert configure(time_limit=text).run.time_limit == text


@pytest.mark.parametrize(
    "text", ["", "-1", "1.5", "1h", "1:60", "1:60:00", "2-", "2-1:2:3:4", "1:2:3:4", "²", "INVALID"]
)
def test_another_form_is_refused_and_the_forms_are_named(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--time-limit .* DAYS-HOURS\[:MINUTES\[:SECONDS\]\], or none"):
        configure(time_limit=text)


def test_time_left_is_reported_with_its_source() -> None:
    assert TimeLeft(7261.6, "PBS_WALLTIME").describe() == "time limit: 2:01:02 left (PBS_WALLTIME)"
