"""Which link is named, in clusters whose links are known."""

from __future__ import annotations

import pytest

from lockstep.diagnosis.observed_steps import LinkUse
from lockstep.diagnosis.stragglers import REPORTS
from lockstep.observe.link_comparison import LinkComparison

GIGABIT = 125_000_000  # bytes per second
SENT = 10_000_000  # bytes per second, by each worker of a ring
Rates = dict[tuple[str, str], int]  # bytes per second of each link while data is on its way
RING = (("a", "b"), ("b", "c"), ("c", "a"))


def _workers(hosts: str, rates: Rates, sent: int = SENT) -> list[LinkUse | None]:
    """Return what each rank of a ring sends to the next one, of which some are on the same host."""
    found: list[LinkUse | None] = []
    for rank, host in enumerate(hosts):
        peer = hosts[(rank + 1) % len(hosts)]
        busy = sent / rates.get((host, peer), GIGABIT)
        found.append(LinkUse(ord(host), ord(peer), sent, round(busy, 3), 7, 300) if peer != host else None)
    return found


def _names(hosts: str, *reports: list[LinkUse | None]) -> list[tuple[int, tuple[str, ...]]]:
    """Return which links are named, each with the number of the report."""
    comparison, found = LinkComparison(list(hosts)), []
    for number, links in enumerate(reports, start=1):
        found += [(number, each.ends) for each in comparison.compare([[each] if each else [] for each in links])]
    return found


@pytest.mark.parametrize(
    ("hosts", "rates", "ends"),
    [
        ("abc", {("a", "b"): GIGABIT // 10}, [("a", "b")]),
        ("abc", {("a", "b"): GIGABIT // 10, ("b", "c"): GIGABIT // 10}, [("b",)]),  # the cable of host b
        ("abc", {}, []),
        ("abc", dict.fromkeys(RING, GIGABIT // 10), []),  # all are slow
        ("abc", {("a", "b"): GIGABIT // 2}, []),
        ("ab", {("b", "a"): GIGABIT // 10}, [("b", "a")]),
        ("ab", {("a", "b"): GIGABIT // 10, ("b", "a"): GIGABIT // 10}, []),
        ("aabbcc", {("a", "b"): GIGABIT // 10}, [("a", "b")]),
        ("abcde", {("a", "b"): GIGABIT // 10, ("c", "d"): GIGABIT // 20}, [("a", "b"), ("c", "d")]),
        ("aaa", {}, []),
    ],
)
def test_the_link_that_is_slower_than_the_others_is_named_once(
    hosts: str, rates: Rates, ends: list[tuple[str, ...]]
) -> None:
    assert _names(hosts, *[_workers(hosts, rates)] * 8) == [(REPORTS, each) for each in ends]


def test_a_link_of_a_named_host_is_not_named_again() -> None:
    one = {("a", "b"): GIGABIT // 10}
    both, rest = _workers("abc", one | {("b", "c"): GIGABIT // 10}), _workers("abc", one)
    assert _names("abc", *[both] * 4, *[rest] * 4) == [(REPORTS, ("b",))]


def test_no_link_is_named_by_chance() -> None:
    slow, sound = _workers("abc", {("a", "b"): GIGABIT // 10}), _workers("abc", {})
    assert _names("abc", slow, slow, sound, slow, slow, sound) == []
    assert _names("abc", *[_workers("abc", {("a", "b"): GIGABIT // 10}, SENT // 10)] * 8) == [], "nothing waits for it"
    rare = [LinkUse(ord("a"), ord("b"), SENT // 10, 0.5, 0, 300), *sound[1:]]
    assert _names("abc", *[rare] * 8) == [], "short messages, which wait for their acknowledgment"


def test_an_address_of_several_hosts_is_left_out() -> None:
    links = [LinkUse(1, 2, SENT, 0.9, 0, 300), *_workers("abc", {})[1:]]
    other = LinkUse(1, 3, SENT, 0.01, 0, 300)
    assert _names("abcd", *[[links[0], links[1], links[2], other]] * 8) == []


def test_a_named_link_has_its_rate_and_the_next_step() -> None:
    comparison = LinkComparison(["node1", "node2", "node3"])
    rates = {("a", "b"): GIGABIT // 10}
    for _ in range(REPORTS):
        found = comparison.compare([[each] for each in _workers("abc", rates) if each])
    (link,) = found
    assert link.describe() == (
        "the link node1 -> node2 is slow: 100 Mbit/s while data waits for it (80 % of the time), where the median of "
        "the others is 1 Gbit/s; 7 segments resent in the last report, round trip 0.3 ms"
    )
    assert link.advice.startswith("measure it: lockstep doctor -H node1,node2; ")
    assert link.rate == pytest.approx(0.1, abs=0.001)
