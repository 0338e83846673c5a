"""A run that is resumed with more epochs says that its learning rate rises again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from disturbed_run import train

from lockstep.errors import LockstepError


class Stop(LockstepError):
    """Raised in a step."""


def _stop() -> None:
    raise Stop


@pytest.mark.parametrize(
    ("first", "stops_at", "then", "rises"),
    [
        ({"epochs": 2}, None, {"epochs": 4}, True),
        ({"epochs": 3}, 31, {"epochs": 9}, True),
        ({"epochs": 3}, 31, {"epochs": 3}, False),
        ({"epochs": 2, "schedule": "constant"}, None, {"epochs": 4, "schedule": "constant"}, False),
        ({"epochs": 2, "warmup_epochs": 2}, 31, {"epochs": 2, "warmup_epochs": 2}, False),
    ],
)
def test_a_rate_that_rises_again_has_a_line(
    first: dict[str, Any],
    stops_at: int | None,
    then: dict[str, Any],
    rises: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if stops_at is None:
        train(tmp_path, {}, **first)
    else:
        with pytest.raises(Stop):
            train(tmp_path, {stops_at: _stop}, **first)
    capsys.readouterr()
    train(tmp_path, {}, **then, resume="auto")
    printed = capsys.readouterr()
    assert ("the learning rate rises again, from" in printed.out + printed.err) == rises
