"""How many workers an elastic job may have, and how long it waits for them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ElasticRules:
    """The workers come and go, `minimum` to `maximum` of them, and begin when there are `initial`.

    Args:
        maximum: None: any number.
        timeout_seconds: How long the job waits for enough workers.
        reset_limit: How many times the job may meet anew; None: any number.
        cooldown_seconds: The least and the greatest time before a failed worker's slot is used again.
    """

    initial: int
    minimum: int
    maximum: int | None = None
    timeout_seconds: float = 600.0
    reset_limit: int | None = None
    cooldown_seconds: tuple[float, float] = (0.0, 0.0)
