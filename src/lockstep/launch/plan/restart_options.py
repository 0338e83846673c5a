"""What a user says of a job's restarts, and of how many workers it may have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from tyro.conf import arg

from lockstep.errors import ConfigError


@dataclass(frozen=True)
class RestartOptions:
    """What becomes of the job when a worker or a host is lost, or hosts come and go."""

    max_restarts: Annotated[int, arg(metavar="N")] = 0
    """Start all workers anew up to N times after a failure; they go on from the newest snapshot or checkpoint."""
    min_np: Annotated[int | None, arg(metavar="M")] = None
    """Fewest workers to go on with when hosts are lost; by default as many as at first."""
    max_np: Annotated[int | None, arg(metavar="K")] = None
    """Most workers, when hosts return or are added; by default as many as at first."""
    host_discovery_script: Annotated[str, arg(metavar="COMMAND")] = ""
    """Prints the hosts of the moment, one host:slots a line; asked every second."""
    elastic_timeout: float = 600.0
    """Seconds to wait for --min-np slots."""

    def __post_init__(self) -> None:
        if self.max_restarts < 0:
            raise ConfigError(f"--max-restarts is a number of restarts, 0 or more; got {self.max_restarts}")
        for flag, value in (("--min-np", self.min_np), ("--max-np", self.max_np)):
            if value is not None and value < 1:
                raise ConfigError(f"{flag} is a number of workers, 1 or more; got {value}")
        if self.min_np and self.max_np and self.min_np > self.max_np:
            raise ConfigError(f"--min-np {self.min_np} is more than --max-np {self.max_np}")
        changes = self.max_restarts or self.max_np or self.host_discovery_script
        if self.min_np and not changes:
            raise ConfigError(f"--min-np {self.min_np} says how few workers may go on: add --max-restarts N")
        if self.elastic_timeout <= 0:
            raise ConfigError(f"--elastic-timeout is a number of seconds above 0; got {self.elastic_timeout:g}")

    @property
    def is_elastic(self) -> bool:
        """Whether the workers may be started more than once."""
        return bool(self.max_restarts or self.min_np or self.max_np or self.host_discovery_script)

    def check(self, workers: int) -> None:
        """Refuse a first number of workers that the flags do not allow.

        Raises:
            ConfigError: It is below the least or above the greatest.
        """
        if self.min_np and workers < self.min_np:
            raise ConfigError(f"the job begins with {workers} workers, fewer than --min-np {self.min_np}")
        if self.max_np and workers > self.max_np:
            raise ConfigError(f"the job begins with {workers} workers, more than --max-np {self.max_np}")
