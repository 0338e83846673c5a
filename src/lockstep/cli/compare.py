"""`lockstep compare`: whether a job is faster or slower than another one, in which part of a step, and what differs."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from lockstep.cli.parse import parse
from lockstep.config.flags import Positional, arg
from lockstep.diagnosis.phases import STEP_PARTS
from lockstep.errors import printable, require
from lockstep.files.output import say

if TYPE_CHECKING:
    from lockstep.report.comparison import Comparison

SLOWER = 11  # exit code if B is certainly slower than allowed
UNCLEAR = 12  # if that cannot be said, such as of what B lacks
AGAIN = "run A and B in turn, at least 5 times each (docs/howto/studies.md#compare-two-runs)"


@dataclass(frozen=True)
class CompareCommand:
    """Say whether B is faster or slower than A, by how much, in which part of a step, and what differs between them.

    Each is a run folder, the records of an observed program, a scaling study, or a folder of several runs.

    Examples:
        lockstep compare runs/before runs/after
        lockstep compare before.jsonl after.jsonl --max-slowdown 3%
    """

    a: Annotated[Positional[Path], arg(metavar="A")]
    """Runs or studies before the change."""
    b: Annotated[Positional[Path], arg(metavar="B")]
    """Runs or studies after the change."""
    max_slowdown: Annotated[str, arg(metavar="PERCENT")] = ""
    """Exit with 11 if B certainly takes more time than this, such as 3%, and with 12 if that is unclear."""
    json: bool = False
    """Print the result as one JSON object."""

    @property
    def limit(self) -> float | None:
        """The largest relative difference that `max_slowdown` allows."""
        if not self.max_slowdown:
            return None
        try:
            limit = float(self.max_slowdown.removesuffix("%")) / 100
        except ValueError:
            limit = -1.0
        require(0 <= limit < math.inf, "--max-slowdown", self.max_slowdown, "a percentage, such as 3%")
        return limit


def main(arguments: Sequence[str]) -> int:
    command = parse(CompareCommand, "compare", arguments)
    limit = command.limit
    from lockstep.report.comparison import compare
    from lockstep.report.sides import differing, read_sides

    a, b = read_sides([command.a, command.b], lambda text: say(printable(f"lockstep compare: warning: {text}")))
    found = {name: compare(runs, b.runs[name]) for name, runs in a.runs.items() if name in b.runs}
    facts = differing(a.facts, b.facts)
    alone = {"A": sorted(a.runs.keys() - b.runs), "B": sorted(b.runs.keys() - a.runs)}
    if command.json:
        results = {name: {"verdict": each.verdict, **asdict(each)} for name, each in found.items()}
        print(json.dumps({"results": results, "differing": facts, "only_in": alone}))
    else:
        for name, each in found.items():
            print(*([f"{name}:"] if name else []), *_lines(each), sep="\n")
        for side, names in alone.items():
            print(f"only in {side}, so not compared: {'; '.join(names)}\n" if names else "", end="")
        print("what differs:" if facts else "no recorded setting or version differs")
        for name, (first, second) in facts.items():
            print(printable(f"  {name}: {first} -> {second}"))
    if limit is None or (not alone["A"] and all(each.interval.high <= limit for each in found.values())):
        return 0
    return SLOWER if any(each.interval.low > limit for each in found.values()) else UNCLEAR


def _lines(found: Comparison) -> list[str]:
    shown = [f"{1 / time:{',.0f' if time < 1e-3 else '.4g'}}" for time in found.seconds["all"]]
    lines = [
        _verdict(found),
        f"A {shown[0]} and B {shown[1]} {found.noun}s/s, {'' if found.alternate else 'not '}measured in turn",
    ]
    unit, scale = ("ms", 1e3) if found.noun == "step" else ("µs", 1e6)
    lines.append(f"{f'{unit} per {found.noun}':14}{'A':>10}{'B':>10}{'B - A':>10}")
    for part, (a, b) in found.seconds.items():
        lines.append(f"{_name(part):14}{scale * a:10.3g}{scale * b:10.3g}{scale * (b - a):+10.3g}")
    return lines


def _name(part: str) -> str:
    return STEP_PARTS[part].name if part in STEP_PARTS else part


def _verdict(found: Comparison) -> str:
    low, middle, high = map(_percent, found.interval)
    size = f"{middle[1:]} {'more' if middle[0] == '+' else 'less'} time per {found.noun}"
    if found.interval.is_certain:
        where = f", mostly in {_name(found.cause)}" if found.cause else ""
        return f"B is {found.verdict}: {size} ({low} to {high}){where}"
    if found.verdict == "no difference":
        return f"no difference above {_percent(found.interval.bound)[1:]} in the time per {found.noun}"
    if found.measured.is_certain:
        return f"unclear: B took {size}, but other work on the machine may be the cause; {AGAIN}"
    if found.interval.high > 100:
        return f"too few records to say; {AGAIN}"
    return f"too noisy to say: the time per {found.noun} differs by {low} to {high}; {AGAIN}"


def _percent(share: float) -> str:
    return f"{100 * share:+.{0 if abs(share) >= 0.0995 else 1}f} %"
