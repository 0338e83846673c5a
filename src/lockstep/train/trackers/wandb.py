"""Weights & Biases; requires the extra `lockstep-torch[wandb]`."""

from __future__ import annotations

from pathlib import Path

from lockstep.config.mapping import to_mapping
from lockstep.config.schema import TrainConfig
from lockstep.errors import ConfigError, first_line
from lockstep.train.trackers.base import Record, Tracker, scalars


class WandbTracker(Tracker):
    """Logs the configuration and scalars as set by W&B variables (WANDB_MODE=offline needs no account)."""

    def __init__(self, config: TrainConfig, folder: Path):
        try:
            import wandb
        except ImportError:
            raise ConfigError("--track wandb: install it with pip install 'lockstep-torch[wandb]'") from None
        try:
            self._run = wandb.init(project="lockstep", name=folder.name, dir=str(folder), config=to_mapping(config))
        except (wandb.errors.UsageError, wandb.errors.AuthenticationError) as error:
            raise ConfigError(
                f"--track wandb: {first_line(error)} To record without an account, set WANDB_MODE=offline"
            ) from None

    def record(self, record: Record) -> None:
        figures = scalars(record)
        if figures:
            self._run.log(figures, step=record["step"])

    def close(self) -> None:
        self._run.finish()
