"""Contestants that are programs: they take turns, and none outlives the contest."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
from commands import write_shims
from contestants import contestants


def test_programs_take_turns_and_end_with_the_contest(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_shims(tmp_path / "shims", "python")
    python = str(tmp_path / "shims" / "python")
    counting = f"import os; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); "
    counting += "from turns import take_turns; seen = iter(range(5, 9)); take_turns(lambda: next(seen))"
    ending = "from turns import take_turns; take_turns(lambda: exit('as a crash does'))"
    commands = {name: [python, "-c", code] for name, code in (("counting", counting), ("ending", ending))}
    with contestants(commands) as turns:
        assert [turns["counting"]() for _ in range(3)] == [5, 6, 7]
        with pytest.raises(RuntimeError, match="ending exited or did not start"):
            turns["ending"]()
        assert "as a crash does" in capfd.readouterr().err
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))
