"""Tracebacks wait until it is clear whether they ended the job."""

from __future__ import annotations

from lockstep.launch.output.tracebacks import HOLD_SECONDS, Tracebacks

TRACE = [b"Traceback (most recent call last):\n", b'  File "x.py", line 1\n', b"ValueError: no\n"]


def test_what_comes_before_is_shown_and_the_rest_waits() -> None:
    now = 0.0
    tracebacks = Tracebacks(lambda: now)
    assert tracebacks.feed([b"step 1\n", TRACE[0]]) == [b"step 1\n"]
    assert tracebacks.feed(TRACE[1:]) == []
    assert tracebacks.due() == []
    assert tracebacks.held == TRACE


def test_a_traceback_of_a_worker_that_goes_on_is_shown_a_little_later_and_once() -> None:
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
