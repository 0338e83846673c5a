"""Which link between two hosts is slower than the others, from what the workers at both ends have sent in a report."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from lockstep.diagnosis.observed_steps import LinkUse
from lockstep.diagnosis.stragglers import REPORTS, medians_of_others
from lockstep.errors import bit_rate, plural
from lockstep.observe.tcp_links import total_use

SLOW = 1 / 3  # of the median rate of the other links, as in `lockstep doctor`
WAITED = 0.2  # share of the time in which data waits for a slow link, at least
LOADED = 1 / 3  # of the bytes that the others send, at least; short messages take as long as their acknowledgment
Pair = tuple[str, str]  # the sending and the receiving host


@dataclass(frozen=True)
class SlowLink:
    """A link that is slower than the others.

    Args:
        ends: The sending and the receiving host, or the one host to which all slow links lead.
        evidence: What was measured.
        rate: Its rate as a share of the other links' median.
    """

    kind: ClassVar[str] = "slow_link"  # of its record
    ends: tuple[str, ...]
    evidence: str
    rate: float

    @property
    def name(self) -> str:
        return f"link {' -> '.join(self.ends)}" if len(self.ends) > 1 else f"network of {self.ends[0]}"

    def describe(self) -> str:
        return f"the {self.name} is slow: {self.evidence}"

    @property
    def advice(self) -> str:
        """What to check, in one clause."""
        hosts = ",".join(self.ends) if len(self.ends) > 1 else f"{self.ends[0]},OTHER"
        return f"measure it: lockstep doctor -H {hosts}; check cables and switch ports"


class LinkComparison:
    """Names each link once that is slow in several reports in a row.

    Args:
        hosts: The host of each rank.
    """

    def __init__(self, hosts: Sequence[str]) -> None:
        self._hosts = hosts
        self._streaks: dict[Pair, int] = {}
        self._named: set[tuple[str, ...]] = set()

    def compare(self, workers: Sequence[Iterable[LinkUse]]) -> list[SlowLink]:
        """Return the links to name, given a new report of each rank."""
        links = _between_hosts(self._hosts, workers)
        slow = _slow_links(links)
        self._streaks = {pair: self._streaks.get(pair, 0) + 1 for pair in slow}
        steady = {pair: slow[pair] for pair, reports in self._streaks.items() if reports >= REPORTS}
        found = [each for each in _join(steady, links) if not self._named & {each.ends, *((end,) for end in each.ends)}]
        self._named.update(each.ends for each in found)
        return found


def _between_hosts(hosts: Sequence[str], workers: Sequence[Iterable[LinkUse]]) -> dict[Pair, LinkUse]:
    """Return the sum of the workers' links for each pair of hosts; an address that several hosts have is left out."""
    owners: dict[int, set[str]] = {}
    for host, links in zip(hosts, workers, strict=True):
        for link in links:
            owners.setdefault(link.own, set()).add(host)
    found: dict[Pair, list[LinkUse]] = {}
    for host, links in zip(hosts, workers, strict=True):
        for link in links:
            (peer, *more) = owners.get(link.peer, {host})
            if not more and peer != host and len(owners[link.own]) == 1:
                found.setdefault((host, peer), []).append(link)
    return {pair: total_use(links) for pair, links in found.items()}


def _rate(link: LinkUse) -> float:
    """Return the bytes per second while data is on its way."""
    return link.bytes_per_second / max(link.busy, 1e-3)


def _slow_links(links: dict[Pair, LinkUse]) -> dict[Pair, float]:
    """Return the slow ones, each with the median rate of the others."""
    rates = medians_of_others([_rate(link) for link in links.values()])
    sent = medians_of_others([link.bytes_per_second for link in links.values()])
    return {
        pair: others
        for (pair, link), others, others_sent in zip(links.items(), rates, sent, strict=True)
        if _rate(link) < SLOW * others and link.busy >= WAITED and link.bytes_per_second >= LOADED * others_sent
    }


def _join(slow: dict[Pair, float], links: dict[Pair, LinkUse]) -> list[SlowLink]:
    """Return the slow links; as one if a single host has them all."""
    shared = set.intersection(*map(set, slow)) if len(slow) > 1 else set[str]()
    if len(shared) == 1:
        worst = min(slow, key=lambda pair: _rate(links[pair]))
        return [_describe(tuple(shared), links[worst], slow[worst])]
    return [_describe(pair, links[pair], others) for pair, others in slow.items()]


def _describe(ends: tuple[str, ...], link: LinkUse, others: float) -> SlowLink:
    evidence = (
        f"{bit_rate(8 * _rate(link))} while data waits for it ({100 * link.busy:.0f} % of the time), where the median "
        f"of the others is {bit_rate(8 * others)}; {plural(link.resent, 'segment')} resent in the last report, round "
        f"trip {link.round_trip / 1e3:.3g} ms"
    )
    return SlowLink(ends, evidence, round(_rate(link) / others, 3))
