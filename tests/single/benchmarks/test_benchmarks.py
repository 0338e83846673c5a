"""The tools of the benchmarks: counts of lines, contestants, intervals, and runs that are watched."""

from __future__ import annotations

import math
import os
import random
import re
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from code_lines import code_lines
from commands import write_shims
from contestants import contestants
from harness import Bar, median_interval
from time_limits import scaled
from watched import Steps, Watched, pss_of_all, watch

SCRIPT = '''"""A script.

With a description.
"""

import os  # counted

# not counted
name = """two
lines"""


def double(
    value: int,
) -> int:
    """Return twice the value."""
    return 2 * value  # counted once
'''


def test_imports_and_all_lines_of_a_statement_count(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    assert code_lines(script) == 7
    assert code_lines(script, script) == 14
    assert code_lines() == 0


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
    with suppress(psutil.NoSuchProcess):
        psutil.Process(int((tmp_path / "pid").read_text())).wait(scaled(10))


@pytest.mark.parametrize(
    ("count", "low", "high"), [(2, 1, 2), (5, 1, 5), (6, 1, 6), (9, 2, 8), (11, 2, 10), (15, 4, 12), (41, 14, 28)]
)
def test_interval_of_a_median_lies_between_its_ordered_values(count: int, low: int, high: int) -> None:
    values = random.Random(0).sample(range(1, count + 1), count)
    assert median_interval([float(value) for value in values]) == [low, high]


def test_the_interval_holds_the_true_median_in_95_of_100_series() -> None:
    draw = random.Random(1)
    held = 0
    for _ in range(2000):
        low, high = median_interval([draw.expovariate(1.0) for _ in range(15)])
        held += low <= math.log(2) <= high
    assert 0.95 <= held / 2000 <= 0.98


@pytest.mark.parametrize(
    ("bar", "ratio", "interval", "verdict"),
    [
        (Bar("at most", 1.1), 1.05, [1.0, 1.2], "at most 1.1: met"),
        (Bar("at most", 1.1), 1.15, [1.0, 1.2], "at most 1.1: MISSED"),
        (Bar("at least", 1.6), 1.7, [1.5, 1.9], "at least 1.6: met"),
        (Bar("at least", 0.98, reaches=1.0), 0.99, [0.97, 1.01], "at least 0.98, its interval reaching 1.00: met"),
        (Bar("at least", 0.98, reaches=1.0), 0.99, [0.98, 0.995], "at least 0.98, its interval reaching 1.00: MISSED"),
        (Bar("at most", 1.02, reaches=1.0), 1.01, [1.005, 1.02], "at most 1.02, its interval reaching 1.00: MISSED"),
    ],
)
def test_bar_is_met_by_median_and_interval(bar: Bar, ratio: float, interval: list[float], verdict: str) -> None:
    assert bar.verdict(ratio, interval) == verdict


STEPS = Steps(re.compile(r"^step \d"), before=1, timed=2, after=1)


def _watch(program: str, folder: Path) -> Watched:
    return watch(["sh", "-c", program], STEPS, folder, os.environ)


def _steps(seconds: Sequence[float]) -> str:
    return "; ".join(f"sleep {each}; echo step {step}" for step, each in enumerate(seconds))


def test_timed_steps_exclude_the_first_and_the_last(tmp_path: Path) -> None:
    watched = _watch(_steps([0.2, 0.1, 0.1, 4]), tmp_path)
    assert 0 < watched.timed_seconds < 4
    assert watched.first_step_seconds >= 0.2


def test_the_memory_is_that_of_all_processes() -> None:
    program = "exec 3<&0; cat <&3 & wait"  # its standard input would be empty otherwise
    with subprocess.Popen(["sh", "-c", program], bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"\n")
        process.stdout.readline()
        (child,) = psutil.Process(process.pid).children()
        both, alone = pss_of_all(process.pid), pss_of_all(child.pid)
        child.kill()
    assert both > alone > 0
    assert pss_of_all(process.pid) == 0


@pytest.mark.parametrize(
    ("program", "error"),
    [
        (_steps([0, 0, 0]), "printed 3 steps instead of 4:\nstep 0"),
        ("echo no images; exit 1", "exited with 1:\nno images"),
    ],
)
def test_failing_command_is_an_error_with_its_output(program: str, error: str, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=error):
        _watch(program, tmp_path)
