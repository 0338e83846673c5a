"""Limits for the number of an elastic job's workers, and for waiting for them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ElasticRules:
    """An elastic job starts with `initial` workers and continues with `minimum` to `maximum`.

    Args:
        maximum: The maximum number of workers; None for no limit.
        timeout_seconds: Limit for waiting for enough workers.
        reset_limit: How many times the job may form a new generation; None for no limit.
        cooldown_seconds: The shortest and longest time before a failed worker's slot is used again.
    """

    initial: int
    minimum: int
    maximum: int | None = None
    timeout_seconds: float = 600.0
    reset_limit: int | None = None
    cooldown_seconds: tuple[float, float] = (0.0, 0.0)
