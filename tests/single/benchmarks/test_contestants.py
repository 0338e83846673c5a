"""Contestants that are programs: they take turns, and none outlives the contest."""

from __future__ import annotations

import sys

import psutil
import pytest
from contestants import contestants


def test_programs_take_turns_and_end_with_the_contest(capfd: pytest.CaptureFixture[str]) -> None:
    counting = "from turns import take_turns; seen = iter(range(5, 9)); take_turns(lambda: next(seen))"
    ending = "from turns import take_turns; take_turns(lambda: exit('as a crash does'))"
    commands = {name: [sys.executable, "-c", code] for name, code in (("counting", counting), ("ending", ending))}
    with contestants(commands) as turns:
        assert [turns["counting"]() for _ in range(3)] == [5, 6, 7]
        with pytest.raises(RuntimeError, match="ending ended, or did not start"):
            turns["ending"]()
        assert "as a crash does" in capfd.readouterr().err
    assert not [child for child in psutil.Process().children() if "take_turns" in " ".join(child.cmdline())]
