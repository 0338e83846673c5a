"""What a worker sends to the launcher arrives whole, whatever the program prints at the same time."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from lockstep.files.output import PART, received, send_line

MARK = "mark: "


def test_long_content_arrives_between_other_lines(capfd: pytest.CaptureFixture[str]) -> None:
    contents = [{"indices": [*range(200_000)]}, {"text": "a\nb"}, {}]
    for content in contents:
        send_line(MARK, content)
    lines = capfd.readouterr().out.split("\n")
    mixed = [line for each in lines for line in (each, "of the program", f"{MARK}0123abcd+of another worker")]
    assert received(mixed, MARK) == contents
    assert max(map(len, lines)) < select.PIPE_BUF


@contextmanager
def printed() -> Iterator[int]:
    """Yield the end of a pipe from which what this process prints can be read."""
    reading, writing = os.pipe()
    before = os.dup(1)
    os.dup2(writing, 1)
    try:
        yield reading
    finally:
        os.dup2(before, 1)
        for each in (reading, writing, before):
            os.close(each)


def test_other_threads_print_between_lines_only() -> None:
    contents = [{"text": f"{number}" * 50 * PART} for number in range(2)]
    threads = [threading.Thread(target=send_line, args=(MARK, content)) for content in contents]
    text = b""
    with printed() as reading:
        for thread in threads:
            thread.start()
        while len(received(text.decode().split("\n")[:-1], MARK)) < len(contents):
            text += os.read(reading, 1000)
        for thread in threads:
            thread.join()
    found = received(text.decode().split("\n"), MARK)
    assert sorted(each["text"][0] for each in found) == ["0", "1"]
    assert all(each in contents for each in found)
