"""Expand Slurm's compact lists of host names and counts.

The grammar is that of Slurm's `scontrol show hostnames` and of SLURM_TASKS_PER_NODE (sbatch(1), "OUTPUT ENVIRONMENT
VARIABLES").
"""

from __future__ import annotations

import re
from itertools import product
from math import prod

MOST = 65_536  # Slurm's limit for the names of one list (MAX_RANGE), so that a typo does not fill the memory
LONGEST = 255
RANGE = r"[0-9]{1,18}(?:-[0-9]{1,18})?"
BRACKET = re.compile(rf"\[({RANGE}(?:,{RANGE})*)\]")
NAMES = rf"(?:[^\[\],\s]|{BRACKET.pattern.replace('(', '(?:', 1)})+"
COUNT = re.compile(r"([0-9]+)(?:\(x([1-9][0-9]*)\))?")


def expand(text: str) -> list[str]:
    """Return the names of a host list such as "hal[01-04,07],x" or "r[1-2]n[01-03]-ib", in the list's order.

    Raises:
        ValueError: The text is not a host list, a range is descending, or there are more names than Slurm allows.
    """
    if not re.fullmatch(rf"{NAMES}(?:,{NAMES})*", text):
        raise ValueError(f"{text!r} is not a Slurm host list such as hal[01-04,07],x")
    names: list[str] = []
    for each in re.findall(NAMES, text):
        pieces = BRACKET.split(each)  # text, inside of a bracket, text, ...
        parts = [_numbers(piece) if at % 2 else [piece] for at, piece in enumerate(pieces)]
        if len(names) + prod(map(len, parts)) > MOST:
            raise ValueError(f"{text!r} names more than {MOST:,} hosts")
        if sum(max(map(len, part)) for part in parts) > LONGEST:
            raise ValueError(f"{text[:80]!r}... has a name of more than {LONGEST} characters, too long for a host")
        names += ("".join(combination) for combination in product(*parts))
    return names


def counts(text: str) -> list[int]:
    """Return the counts of "4(x2),3", one per node: 4, 4, 3.

    Raises:
        ValueError: The text is not a list of counts, or counts for more nodes than Slurm allows.
    """
    found: list[int] = []
    for part in text.split(","):
        match = COUNT.fullmatch(part)
        if not match:
            raise ValueError(f"{text!r} is not a list of counts such as 4(x2),3")
        repeat = int(match[2] or 1)
        if len(found) + repeat > MOST:
            raise ValueError(f"{text!r} has counts for more than {MOST:,} nodes")
        found += [int(match[1])] * repeat
    return found


def _numbers(inside: str) -> list[str]:
    """Return the numbers inside a bracket, each padded to the width of its range's first number."""
    numbers: list[str] = []
    for part in inside.split(","):
        first, _, last = part.partition("-")
        low, high = int(first), int(last or first)
        if high < low:
            raise ValueError(f"the range {part} of a host list is descending")
        if high - low >= MOST:
            raise ValueError(f"the range {part} of a host list has more than {MOST:,} numbers")
        numbers += (str(number).zfill(len(first)) for number in range(low, high + 1))
    return numbers
