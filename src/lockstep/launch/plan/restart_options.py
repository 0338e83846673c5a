"""Options for a job's restarts, and limits for its number of workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from lockstep.config.flags import arg
from lockstep.errors import ConfigError, require


@dataclass(frozen=True)
class RestartOptions:
    """How the job continues when a worker or a host fails, or the hosts change."""

    max_restarts: Annotated[int, arg(metavar="N")] = 0
    """Restarts after failures; only training resumes by itself."""
    min_np: Annotated[int | None, arg(metavar="M")] = None
    """Fewest workers to continue with. Default: the initial number."""
    max_np: Annotated[int | None, arg(metavar="K")] = None
    """Most workers, if hosts are added. Default: the initial number."""
    host_discovery_script: Annotated[str, arg(metavar="COMMAND")] = ""
    """Command that prints the current hosts, one host:slots per line."""
    elastic_timeout: float = 600.0
    """Seconds to wait for --min-np slots."""

    def __post_init__(self) -> None:
        require(self.max_restarts >= 0, "--max-restarts", self.max_restarts, "at least 0")
        for flag, value in (("--min-np", self.min_np), ("--max-np", self.max_np)):
            require(value is None or value >= 1, flag, value, "at least 1")
        if self.min_np and self.max_np and self.min_np > self.max_np:
            raise ConfigError(f"--min-np {self.min_np} is more than --max-np {self.max_np}")
        changes = self.max_restarts or self.max_np or self.host_discovery_script
        if self.min_np and not changes:
            raise ConfigError(f"--min-np {self.min_np} limits restarts: add --max-restarts N")
        require(self.elastic_timeout > 0, "--elastic-timeout", self.elastic_timeout, "above 0 seconds")

    @property
    def is_elastic(self) -> bool:
        """Whether the workers may be started more than once."""
        return bool(self.max_restarts or self.min_np or self.max_np or self.host_discovery_script)

    def check(self, workers: int) -> None:
        """Check the initial number of workers.

        Raises:
            ConfigError: It is below --min-np or above --max-np.
        """
        if self.min_np and workers < self.min_np:
            raise ConfigError(f"the job starts with {workers} workers, fewer than --min-np {self.min_np}")
        if self.max_np and workers > self.max_np:
            raise ConfigError(f"the job starts with {workers} workers, more than --max-np {self.max_np}")


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
