"""Slurm's compact lists of hosts and counts."""

from __future__ import annotations

import os
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.world.batch_job import age_of, job_age
from lockstep.world.slurm_hostlist import counts, expand


def test_variable_that_no_ancestor_has_is_this_processes_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PBS_JOBID", "7")
    assert job_age("PBS_JOBID") == pytest.approx(age_of(os.getpid()), abs=0.5)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("hal", ["hal"]),
        ("hal,x", ["hal", "x"]),
        ("hal[01-04,07],x", ["hal01", "hal02", "hal03", "hal04", "hal07", "x"]),
        ("r[1-2]n[01-02]", ["r1n01", "r1n02", "r2n01", "r2n02"]),
        ("n[1-2]-ib.site", ["n1-ib.site", "n2-ib.site"]),
        ("n[9-11]", ["n9", "n10", "n11"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
        ("n[3]", ["n3"]),
        ("[1-2]", ["1", "2"]),
        ("b,a[2,1],b", ["b", "a2", "a1", "b"]),
        ("node-1,node-[2-3]", ["node-1", "node-2", "node-3"]),
    ],
)
def test_a_host_list_is_written_out_in_its_own_order(text: str, names: list[str]) -> None:
    assert expand(text) == names


@pytest.mark.parametrize(
    "text",
    [
        *("", ",", "a,", ",a", "a,,b", "a[", "a]", "a[]", "a[1", "a1]", "a[1-]", "a[-2]", "a[1,]", "a[[1]]", "a[x-y]"),
        *("a b", "a[1-2-3]", "a[2-1]", "a[0-99999999]", "a[0-999]b[0-999]", "a[1 -2]", "a[١-٣]", "a\n"),
    ],
)
def test_invalid_host_list_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="host"):
        expand(text)


@pytest.mark.parametrize(
    ("text", "expected"), [("4(x2),3", [4, 4, 3]), ("1", [1]), ("2,1(x3)", [2, 1, 1, 1]), ("16(x1)", [16])]
)
def test_counts_are_written_out(text: str, expected: list[int]) -> None:
    assert counts(text) == expected


@pytest.mark.parametrize("text", ["", "4,", "4(x)", "4(x0)", "4(2)", "x2", "4(x2", "-1", "4 (x2)", "1(x99999999)"])
def test_invalid_list_of_counts_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="count"):
        counts(text)


@given(
    prefix=st.from_regex(r"[a-z][a-z0-9-]{0,6}", fullmatch=True),
    ranges=st.lists(st.tuples(st.integers(0, 300), st.integers(0, 20)), min_size=1, max_size=4),
    width=st.integers(1, 5),
    suffix=st.sampled_from(["", "-ib", ".site.org"]),
)
def test_a_bracket_is_its_numbers_between_prefix_and_suffix(
    prefix: str, ranges: list[tuple[int, int]], width: int, suffix: str
) -> None:
    inside = ",".join(f"{low:0{width}}-{low + more}" for low, more in ranges)
    expected = [f"{prefix}{n:0{width}}{suffix}" for low, more in ranges for n in range(low, low + more + 1)]
    assert expand(f"{prefix}[{inside}]{suffix}") == expected


@given(st.lists(st.tuples(st.integers(0, 200), st.integers(1, 9)), min_size=1, max_size=6))
def test_counts_repeat_as_they_say(runs: list[tuple[int, int]]) -> None:
    text = ",".join(f"{count}(x{repeat})" if repeat > 1 else str(count) for count, repeat in runs)
    assert counts(text) == [count for count, repeat in runs for _ in range(repeat)]


@given(st.text(alphabet="a1[]-,x( )", max_size=12))
def test_any_text_is_read_or_refused(text: str) -> None:
    for read in (expand, counts):
        with suppress(ValueError):
            assert read(text)


@pytest.mark.parametrize("text", ["x" * 256 + "[1-60000]", "a[" + "0" * 4000 + "1-60000]"])
def test_long_names_do_not_fill_the_memory(text: str) -> None:
    with pytest.raises(ValueError, match=r"too long for a host|is not a Slurm host list"):
        expand(text)
