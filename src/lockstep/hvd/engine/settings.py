"""The supported HOROVOD_* variables and Lockstep's own; docs/reference/horovod.md also lists those without effect."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta

from lockstep.diagnosis import REPORT, REPORT_SECONDS
from lockstep.world import NODE_PROCESS
from lockstep.world.rendezvous import START_TIMEOUT, WORKERS_SECONDS

# Gloo breaks a group if an operation exceeds its timeout. A worker may wait for its peers without limit (the stall
# report lists them), so operations get a year; connecting has its own limit.
NO_TIMEOUT = timedelta(days=365)


@dataclass(frozen=True)
class Settings:
    """The engine's settings."""

    fusion_threshold_bytes: int = 128 << 20
    cycle_time_seconds: float = 0.001
    dynamic_process_sets: bool = False
    timeline: str = ""
    timeline_mark_cycles: bool = False
    stall_check: bool = True
    stall_warning_seconds: float = 60.0
    stall_shutdown_seconds: float = 0.0
    straggler_seconds: float = REPORT_SECONDS
    check_replicas: int = 100  # steps; 0 for never
    start_timeout_seconds: float = WORKERS_SECONDS
    gloo_timeout_seconds: float = 30.0
    elastic: bool = False

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Settings:
        """Read the settings from the environment.

        Raises:
            ValueError: A variable is not a number, or is negative.
        """

        def number(name: str, default: float) -> float:
            text = environment.get(name, "")
            try:
                value = float(text) if text else default
            except ValueError:
                raise ValueError(f"{name}={text}: must be a number") from None
            if value < 0:
                raise ValueError(f"{name}={text}: must be at least 0")
            return value

        flag: Callable[[str], bool] = lambda name: number(name, 0) != 0  # noqa: E731
        return cls(
            fusion_threshold_bytes=int(number("HOROVOD_FUSION_THRESHOLD", cls.fusion_threshold_bytes)),
            cycle_time_seconds=number("HOROVOD_CYCLE_TIME", 1.0) / 1000,
            dynamic_process_sets=flag("HOROVOD_DYNAMIC_PROCESS_SETS"),
            timeline=environment.get("HOROVOD_TIMELINE", ""),
            timeline_mark_cycles=flag("HOROVOD_TIMELINE_MARK_CYCLES"),
            stall_check=not flag("HOROVOD_STALL_CHECK_DISABLE"),
            stall_warning_seconds=number("HOROVOD_STALL_CHECK_TIME_SECONDS", cls.stall_warning_seconds),
            stall_shutdown_seconds=number("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", cls.stall_shutdown_seconds),
            straggler_seconds=number(REPORT, cls.straggler_seconds),
            check_replicas=int(number("LOCKSTEP_CHECK_REPLICAS", cls.check_replicas)),
            start_timeout_seconds=number(START_TIMEOUT, cls.start_timeout_seconds),
            gloo_timeout_seconds=number("HOROVOD_GLOO_TIMEOUT_SECONDS", cls.gloo_timeout_seconds),
            elastic=NODE_PROCESS in environment,
        )
