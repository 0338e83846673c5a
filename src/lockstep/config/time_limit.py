"""Time limits in Slurm's format, the time left, and the signals that announce a limit."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from datetime import timedelta

FORMS = "MINUTES, MINUTES:SECONDS, HOURS:MINUTES:SECONDS or DAYS-HOURS[:MINUTES[:SECONDS]]"
# Sent before a job is ended: Slurm, LSF and `timeout` send the signal that the user chooses, Grid Engine SIGUSR1 and
# SIGUSR2, and LSF and Linux SIGXCPU at a limit of CPU time. Each ends a process without a handler.
NOTICE = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)
NONE = ("none", "0", "UNLIMITED", "INFINITE")
_DAYS = re.compile(r"([0-9]+)-([0-9]+)(?::([0-5]?[0-9]))?(?::([0-5]?[0-9]))?")
_HOURS = re.compile(r"(?:([0-9]+):)?([0-9]+):([0-5]?[0-9])")


@dataclass(frozen=True)
class TimeLeft:
    """The seconds left, and the source of the limit, such as a flag or a batch system."""

    seconds: float
    source: str

    def describe(self) -> str:
        return f"time limit: {timedelta(seconds=max(0, round(self.seconds)))} left ({self.source})"


def parse_time_limit(text: str) -> int | None:
    """Parse a time limit in one of Slurm's formats (`FORMS`) into seconds; None for no limit.

    Raises:
        ValueError: The text has another format.
    """
    if text in NONE:
        return None
    if match := _DAYS.fullmatch(text):
        days, hours, minutes, seconds = (int(number or 0) for number in match.groups())
    elif (match := _HOURS.fullmatch(text)) and (match[1] is None or int(match[2]) < 60):
        days, (hours, minutes, seconds) = 0, (int(number or 0) for number in match.groups())
    elif text.isascii() and text.isdecimal():
        days, hours, minutes, seconds = 0, 0, int(text), 0
    else:
        raise ValueError(f"{text}: must be {FORMS}, or none")
    return (((days * 24 + hours) * 60 + minutes) * 60 + seconds) or None
