"""Phases of a step, and stragglers, in records that may be damaged."""

from __future__ import annotations

import math

import pytest

from lockstep.observe.link_comparison import SlowLink
from lockstep.report.worker_records import (
    MAX_LINKS,
    MAX_RANKS,
    RunRecords,
    StragglerRecord,
    phase_medians,
    phase_seconds,
    read_slow_link,
    read_straggler,
)

STRAGGLER = {"step": 150, "ranks": [3], "host": "b", "phase": "forward", "seconds": 0.052, "others_seconds": 0.031}
NONSENSE = (None, "x", [], {}, True, -1, math.nan, math.inf, 10**400, 1e100)


@pytest.mark.parametrize("value", NONSENSE)
def test_invalid_phases_are_omitted_and_valid_ones_are_kept(value: object) -> None:
    whole = {"min": 1.0, "median": 2.0, "max": 3.0, "slowest": 0}
    for part in ("min", "median", "max"):
        record = {"phase_spread": {"forward": whole, "backward": {**whole, part: value}, "metrics": value}}
        assert phase_medians(record) == {"forward": 2.0}
    seconds = {"phase_seconds": {"forward": [1.0, 2.0], "backward": [1.0, value], "metrics": value}}
    assert phase_seconds(seconds, 2) == {"forward": [1.0, 2.0]}
    assert phase_medians({"phase_spread": value}) == phase_seconds({"phase_seconds": value}, 2) == {}


def test_unknown_or_partial_phases_are_omitted() -> None:
    assert phase_medians({"phase_spread": {"sleep": {"min": 1.0, "median": 2.0, "max": 3.0}}}) == {}
    assert phase_medians({"phase_spread": {"forward": {"min": 1.0, "median": 0.5, "max": 3.0}}}) == {}
    assert phase_seconds({"phase_seconds": {"sleep": [1.0, 2.0], "forward": [1.0, 2.0, 3.0]}}, 2) == {}
    assert phase_seconds({"phase_seconds": {"forward": []}}, 0) == {}


def test_straggler_has_each_rank_once_in_order_with_its_host() -> None:
    assert read_straggler(STRAGGLER) == StragglerRecord((3,), "b", "forward", 0.052, 0.031, step=150)
    found = read_straggler(STRAGGLER | {"ranks": [7, 3, 7], "host": "a\x1b[2J\nb"})
    assert (found.ranks, found.host) == ((3, 7), "a\ufffd[2J b")
    assert read_straggler(STRAGGLER | {"host": 3}) == StragglerRecord((3,), "", "forward", 0.052, 0.031, step=150)


@pytest.mark.parametrize("field", ["step", "ranks", "phase", "seconds", "others_seconds"])
@pytest.mark.parametrize("value", [None, [], {}, True, -1, "", math.nan, [-1], list(range(MAX_RANKS + 1))])
def test_straggler_without_a_valid_field_is_dropped(field: str, value: object) -> None:
    assert read_straggler(STRAGGLER | {field: value}) is None


def test_slow_links_of_the_last_session_are_kept() -> None:
    link = {"kind": "slow_link", "ends": ["a\x1b[2J", "b"], "evidence": "0.1 Gbit/s", "rate": 0.1}
    assert read_slow_link(link) == SlowLink(("a\ufffd[2J", "b"), "0.1 Gbit/s", 0.1)
    records = RunRecords()
    for number in range(2 * MAX_LINKS):
        records.take(link | {"ends": [str(number)]})
    assert len(records.slow_links) == MAX_LINKS
    records.take_all([{"kind": "run"}, link])
    assert [each.ends for each in records.slow_links] == [("a\ufffd[2J", "b")]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("ends", []),
        ("ends", ["a", "b", "c"]),
        ("ends", 3),
        ("evidence", ""),
        ("rate", 1.1),
        ("rate", None),
        ("rate", -1),
    ],
)
def test_slow_link_without_a_valid_field_is_dropped(field: str, value: object) -> None:
    link = {"ends": ["a", "b"], "evidence": "0.1 Gbit/s", "rate": 0.1}
    assert read_slow_link(link | {field: value}) is None
