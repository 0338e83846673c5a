"""The workers' output: bytes to lines, delayed tracebacks, and what is shown and written."""

from __future__ import annotations

import asyncio
import shutil
import time
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from lockstep.errors import ConfigError
from lockstep.launch.output import BAR_SECONDS, HOLD_SECONDS, Display, Lines, Name, OutputPlan, Screen, Tracebacks

TRACE = [b"Traceback (most recent call last):\n", b'  File "x.py", line 1\n', b"ValueError: no\n"]
TRACEBACK = b"Traceback (most recent call last):\n"


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_lines_are_whole_however_the_bytes_arrive(size: int) -> None:
    data = "one\n\nthrée\r\nlast".encode()
    lines = Lines()
    chunks = [data[start : start + size] for start in range(0, len(data), size)]
    assert [line for chunk in chunks for line in lines.feed(chunk)] == [b"one\n", b"\n", "thrée\n".encode()]
    assert lines.rest() == [b"last\n"]
    assert lines.rest() == []


def test_a_progress_bar_is_a_line_now_and_then_and_in_the_end() -> None:
    now = 0.0
    lines = Lines(clock=lambda: now)
    assert lines.feed(b"\r 1%") == []
    assert lines.feed(b"\r 2%") == [b" 1%\n"]
    assert lines.feed(b"\r 3%\r 4%\r") == []
    now = BAR_SECONDS
    assert lines.feed(b" 5%\r 6%") == [b" 5%\n"]
    assert lines.feed(b"\r100%\r\n") == [b"100%\n"]
    assert lines.feed(b"plain\n") == [b"plain\n"]
    assert len(lines.held) == 0
    lines = Lines()  # a bar that was just shown is not shown twice
    assert lines.feed(b"\rdone\r") == [b"done\n"]
    assert lines.feed(b"\n") == []


def test_what_comes_before_is_shown_and_the_rest_waits() -> None:
    now = 0.0
    tracebacks = Tracebacks(lambda: now)
    assert tracebacks.feed([b"step 1\n", TRACE[0]]) == [b"step 1\n"]
    assert tracebacks.feed(TRACE[1:]) == []
    assert tracebacks.due() == []
    assert tracebacks.held == TRACE


@pytest.mark.parametrize(
    "line",
    [
        b'  File "/home/x/train.py", line 12\n',
        b"/opt/bin/python3.12: can't open file '/home/x/train.py': [Errno 2] No such file or directory\n",
        b"/opt/bin/python: can't find '__main__' module in '/home/x'\n",
        b"python: No module named train\n",
        b"python3: Error while finding module specification for 'a.b' (ModuleNotFoundError: No module named 'a')\n",
        b"usage: train.py [-h] data\n",
        b"Usage: train.py [OPTIONS]\n",
    ],
)
def test_errors_without_traceback_wait_like_one(line: bytes) -> None:
    assert Tracebacks().feed([b"before\n", line, b"after\n"]) == [b"before\n"]


def test_stacks_of_a_running_program_do_not_wait() -> None:
    lines = [b"Current thread 0x01 (most recent call first):\n", b'  File "train.py", line 1 in step\n']
    assert Tracebacks().feed(lines) == lines  # of faulthandler


def test_a_traceback_of_a_running_worker_is_shown_once() -> None:
    now = 0.0
    tracebacks = Tracebacks(lambda: now)
    tracebacks.feed(TRACE)
    now = HOLD_SECONDS
    assert tracebacks.due() == TRACE
    assert tracebacks.due() == []
    assert tracebacks.feed([b"step 2\n"]) == [b"step 2\n"]


def test_an_endless_stream_is_not_held_back_for_ever() -> None:
    tracebacks = Tracebacks()
    tracebacks.feed(TRACE)
    assert len(tracebacks.feed([b"x" * 1000 + b"\n"] * 2000)) == 2003


def show(display: Display, *chunks: tuple[int, Name, bytes]) -> None:
    """Show chunks of output, and the end of each stream."""
    screen = Screen(display)

    async def show_all() -> None:
        for each in (*chunks, *((rank, name, b"") for rank, name in {chunk[:2]: None for chunk in chunks})):
            await screen.show(*each)

    asyncio.run(show_all())
    display.close()


def test_streams_are_prefixed_and_kept_in_files(tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    display = Display(OutputPlan(11, folder=tmp_path))
    show(
        display,
        (0, "stdout", b"to"),
        (10, "stdout", b"whole\n"),
        (0, "stdout", b"rn\nlast"),
        (10, "stderr", b"trouble\n"),
    )
    out, err = capfdbinary.readouterr()
    assert out.splitlines() == [b"[10]<stdout>:whole", b"[0]<stdout>:torn", b"[0]<stdout>:last"]
    assert err == b"[10]<stderr>:trouble\n"
    assert (tmp_path / "rank.00" / "stdout").read_bytes() == b"torn\nlast\n"
    assert (tmp_path / "rank.10" / "stdout").read_bytes() == b"whole\n"
    assert (tmp_path / "rank.10" / "stderr").read_bytes() == b"trouble\n"


def test_workers_that_print_nothing_have_empty_files(tmp_path: Path) -> None:
    (tmp_path / "rank.1").mkdir()
    (tmp_path / "rank.1" / "stderr").write_text("of an earlier job")
    display = Display(OutputPlan(2, folder=tmp_path, logs=tmp_path / "logs"))
    contents = {str(path.relative_to(tmp_path)): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    streams = {f"rank.{rank}/{name}" for rank in (0, 1) for name in ("stdout", "stderr")}
    assert contents == dict.fromkeys(streams | {"logs/worker-0.log", "logs/worker-1.log"}, b"")
    assert display.log_of(1) is None  # nothing to read there
    display.close()


def test_failed_writes_are_reported_once_and_lines_are_shown(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    display = Display(OutputPlan(1, folder=tmp_path))
    shutil.rmtree(tmp_path / "rank.0")
    (tmp_path / "rank.0").write_text("in the way")
    with Path("/dev/full").open("w") as full, redirect_stdout(full):
        lines: list[tuple[int, Name, bytes]] = [(0, "stdout", b"x" * 60_000 + b"\n")] * 9
        show(display, *lines, (0, "stderr", b"seen\n"))
    said = capfd.readouterr().err.splitlines()
    assert "[0]<stderr>:seen" in said
    assert len(said) == 4
    assert "lockstep: stdout cannot be written: No space left on device" in said


def test_an_impossible_folder_is_an_error_before_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"--output-filename .*file"):
        Display(OutputPlan(1, folder=tmp_path / "file"))
    (tmp_path / "rank.0").touch()
    with pytest.raises(ConfigError, match=r"rank.0/stdout: .*choose another folder"):
        Display(OutputPlan(1, folder=tmp_path))


def test_a_line_may_begin_with_the_time() -> None:
    prefix = OutputPlan(2, timestamps=True).prefix(1, "stderr").decode()
    time.strptime(prefix.removesuffix("[1]<stderr>:"))


def test_an_equal_error_of_other_workers_is_not_shown_again(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    async def fail_alike() -> str:
        screen = Screen(Display(OutputPlan(3)))
        for rank, name in enumerate((b"x", b"x", b"y")):
            await screen.show(rank, "stderr", b"python: No module named " + name + b"\n")
        screen.release(but=0)
        return screen.last_lines(0)

    assert asyncio.run(fail_alike()) == "python: No module named x"
    assert capfdbinary.readouterr().err == b"[2]<stderr>:python: No module named y\n"


@pytest.mark.parametrize("flags", ["--local_rank", "--local-rank/--local_rank", "data, --local_rank"])
def test_a_script_that_requires_its_local_rank_gets_advice(flags: str) -> None:
    async def fail(message: str) -> str:
        screen = Screen(Display(OutputPlan(1)))
        await screen.show(0, "stderr", f"usage: train.py\ntrain.py: error: {message}: {flags}\n".encode())
        return screen.last_lines(0).splitlines()[-1]

    assert 'int(os.environ["LOCAL_RANK"])' in asyncio.run(fail("the following arguments are required"))
    assert "LOCAL_RANK" not in asyncio.run(fail("unrecognized arguments"))
