"""What a worker sends to the launcher arrives whole, whatever the program prints at the same time."""

from __future__ import annotations

import os
import select
import threading

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


def test_other_threads_print_between_lines_only(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    write = os.write
    monkeypatch.setattr(os, "write", lambda _, text: write(writing, text))
    contents = [{"text": f"{number}" * 50 * PART} for number in range(2)]
    threads = [threading.Thread(target=send_line, args=(MARK, content)) for content in contents]
    for thread in threads:
        thread.start()
    text = b""
    while len(received(text.decode().split("\n")[:-1], MARK)) < len(contents):
        text += os.read(reading, 1000)
    for thread in threads:
        thread.join()
    found = received(text.decode().split("\n"), MARK)
    assert sorted(each["text"][0] for each in found) == ["0", "1"]
    assert all(each in contents for each in found)
