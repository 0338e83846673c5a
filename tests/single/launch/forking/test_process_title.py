"""Titles of processes, read by psutil."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest

from lockstep.launch.forking import process_title

CODE = """
import sys
from lockstep.launch.forking.process_title import set_title
for title in sys.stdin:
    set_title(title[:-1])
    print("set", flush=True)
"""

pytestmark = [
    pytest.mark.cold,
    pytest.mark.skipif(sys.platform != "linux", reason="the titles are Linux's"),
]


def titles(*shown: str, arguments: tuple[str, ...] = (process_title.PADDING,)) -> list[str]:
    """The command line of a process after it has set each of the titles."""
    command = [sys.executable, "-c", CODE, *arguments]
    found = []
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for title in shown:
            process.stdin.write(f"{title}\n")
            process.stdin.flush()
            assert process.stdout.readline() == "set\n"
            with open(f"/proc/{process.pid}/cmdline", "rb") as file:
                found.append(file.read().decode().rstrip("\0"))
        process.stdin.close()
    assert process.returncode == 0
    return found


def test_a_title_replaces_the_command_and_the_title_before() -> None:
    shown = ["python train.py --name a-long-name-of-a-run", "short", "größer"]
    assert titles(*shown) == shown


def test_a_title_is_cut_to_the_memory_of_the_arguments() -> None:
    (shown,) = titles("x" * 10_000, arguments=())
    assert 0 < len(shown) < 10_000
    assert set(shown) == {"x"}


def test_the_padding_leaves_room_for_two_thousand_bytes() -> None:
    assert titles("y" * 2000) == ["y" * 2000]


def test_psutil_sees_the_arguments() -> None:
    code = f"{CODE}\nimport psutil; print(psutil.Process().cmdline())"
    done = subprocess.run(
        [sys.executable, "-c", code, process_title.PADDING], input="python a.py b\n", capture_output=True, text=True
    )
    assert done.stdout == "set\n['python', 'a.py', 'b']\n"


def test_nothing_happens_where_the_memory_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    before = psutil.Process().cmdline()
    monkeypatch.setattr(process_title, "_argument_memory", lambda: (0, 0))
    process_title.set_title("none")
    assert psutil.Process().cmdline() == before
