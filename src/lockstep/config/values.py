"""Values of flags: sizes, time limits, global batches, and the functions that MODULE:FUNCTION names."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from typing import Any

from lockstep.errors import ConfigError

BINARY = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, **BINARY}
UNITS |= {f"{unit}ib": size for unit, size in BINARY.items()}


def parse_size(text: str, flag: str) -> int:
    """Parse a size in bytes. K or KiB is 1,024 bytes, and KB 1,000; likewise M, G and T. Case is ignored.

    Raises:
        ConfigError: The text is not a size, or the size is below one byte.
    """
    matched = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    unit = matched and UNITS.get(matched[2].lower())
    if not matched or not unit or (size := int(float(matched[1]) * unit)) < 1:
        raise ConfigError(f"{flag} {text}: must be a size such as 4096, 64KiB or 1.5GB")
    return size


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


def resolve(flag: str, reference: str) -> Callable[..., Any]:
    """Import the function that `reference` names; the current folder is searched for modules, too."""
    module_name, _, name = reference.partition(":")
    if not (module_name and name):
        raise ConfigError(f"{flag} {reference}: must be MODULE:FUNCTION, such as mypackage.train:build")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise ConfigError(
            f"{flag} {reference}: no module {error.name!r} in the current folder or the environment"
        ) from None
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"{flag} {reference}: module {module_name} has no function {name!r}")
    return function  # type: ignore[no-any-return]


def check_global_batch(command: Sequence[str], flag: str, global_batch: int | None, counts: Sequence[int]) -> None:
    """Check that a program takes its batch size, if the samples per step of all workers are given, and only then.

    Raises:
        ConfigError: It does not, or they cannot be divided.
    """
    takes_batch = any("{batch}" in word for word in command)
    if takes_batch and global_batch is None:
        raise ConfigError(f"{{batch}} in the command needs {flag} N, the samples per step of all workers")
    if global_batch is None:
        return
    if not takes_batch:
        raise ConfigError(f"{flag} needs {{batch}} in the command, such as: -- python train.py -b {{batch}}")
    for workers in counts:
        if global_batch < 1 or global_batch % workers:
            raise ConfigError(f"{flag} {global_batch}: must be a multiple of {workers} workers")
