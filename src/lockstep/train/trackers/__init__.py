"""Outputs for a run's records: one tracker per file; the one in `base.py` is a no-op.

Only rank 0 builds real trackers, so no other code needs to check the rank.
"""

from __future__ import annotations

from lockstep.config.schema import TrainConfig
from lockstep.train.progress import Progress
from lockstep.train.run_folder import RunFolder, logger
from lockstep.train.trackers.base import ALWAYS, DETAIL, INFO, RecordTracker, Tracker, TrackerGroup
from lockstep.train.trackers.console import build_console
from lockstep.world.world import World

__all__ = ["ALWAYS", "DETAIL", "INFO", "Tracker", "build_trackers"]


def build_trackers(config: TrainConfig, world: World, folder: RunFolder, progress: Progress, classes: int) -> Tracker:
    """Build the configured trackers on rank 0, and a no-op tracker on other ranks.

    Args:
        classes: Number of classes of the data set.

    Raises:
        ConfigError: A tracker's package is not installed.
    """
    if not world.is_main:
        return Tracker()
    console = build_console(config.run, classes)

    def warn(line: str) -> None:
        console.say(line, ALWAYS)
        logger.warning(line)

    records = RecordTracker(folder.metrics, progress.step, in_epoch=progress.epoch_totals.count > 0, warn=warn)
    trackers: list[Tracker] = [records, console]
    if "tensorboard" in config.run.track:
        from lockstep.train.trackers.tensorboard import TensorBoardTracker

        trackers.append(TensorBoardTracker(folder.path / "tensorboard", progress.step, warn))
    if "mlflow" in config.run.track:
        from lockstep.train.trackers.mlflow import MlflowTracker

        trackers.append(MlflowTracker(config, folder.path))
    if "wandb" in config.run.track:
        from lockstep.train.trackers.wandb import WandbTracker

        trackers.append(WandbTracker(config, folder.path))
    return TrackerGroup(trackers)
