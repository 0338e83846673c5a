"""The configured trackers: TensorBoard, MLflow and Weights & Biases, beside the run's records and the console.

The packages of MLflow and W&B are extras: `lockstep-torch[mlflow]` and `lockstep-torch[wandb]`.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.config.mapping import to_mapping
from lockstep.config.schema import TrainConfig
from lockstep.errors import ConfigError, first_line
from lockstep.imports import collector_paused
from lockstep.run.position import Position
from lockstep.run.records.run_folder import RunFolder, logger
from lockstep.run.records.trackers import ALWAYS, Record, RecordTracker, Tracker, scalars
from lockstep.world.world import World

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

ROOM_BYTES = 1 << 20  # free disk space required to write


class TensorBoardTracker(Tracker):
    """Writes scalars over optimizer steps; a resumed run hides the steps that it repeats.

    On a full disk the event file is closed, with one warning, and a new one is opened when there is space. The curve
    has a gap; `metrics.jsonl` is complete. TensorBoard is imported with the first record, not before the first step.
    """

    def __init__(self, folder: Path, start_step: int, warn: Callable[[str], None] = logger.warning):
        self._folder = folder
        self._warn, self._has_warned = warn, False
        self._writer: SummaryWriter | None = None
        self._hidden_from: int | None = start_step + 1  # the first file hides earlier files from this step on

    def record(self, record: Record) -> None:
        figures = scalars(record)
        if not figures:
            return
        try:
            self._check_room()
            self._writer = self._writer or self._open()
            from tensorboard.compat.proto.summary_pb2 import Summary  # with torch's writer

            # One event, not `add_scalar` for each figure: its thread would take the GIL from the next steps as often.
            values = [Summary.Value(tag=tag, simple_value=value) for tag, value in figures.items()]
            events: Any = self._writer.file_writer
            events.add_summary(Summary(value=values), record["step"])
        except OSError as error:
            if not self._has_warned:
                self._warn(f"{self._folder} cannot be written: {error.strerror or error}; metrics.jsonl is complete")
            self._has_warned = True
            self._give_up()

    def close(self) -> None:
        self._give_up()

    def _open(self) -> SummaryWriter:
        with collector_paused():
            from torch.utils.tensorboard import SummaryWriter

        try:
            writer = SummaryWriter(str(self._folder), purge_step=self._hidden_from)
        except UnicodeEncodeError:
            raise OSError(errno.EINVAL, "TensorBoard needs a path that is valid UTF-8") from None
        self._hidden_from = None
        return writer

    def _check_room(self) -> None:
        """Raise OSError if the disk is full or read-only; in TensorBoard's thread, it would print a traceback."""
        self._folder.mkdir(parents=True, exist_ok=True)
        if shutil.disk_usage(self._folder).free < ROOM_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if not os.access(self._folder, os.W_OK):
            raise OSError(errno.EROFS, "read-only")

    def _give_up(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            with suppress(OSError):  # raised again for buffered data
                writer.close()


INSTALL = "pip install 'lockstep-torch[mlflow]'"


class MlflowTracker(Tracker):
    """Logs the configuration and scalars to the server or database set by MLflow's environment variables.

    The default is MLflow's, mlflow.db in the current folder.
    """

    def __init__(self, config: TrainConfig, folder: Path):
        """Start a run.

        Raises:
            ConfigError: MLflow or what its store needs is not installed, or the store's address is invalid.
        """
        try:
            from mlflow import MlflowClient
            from mlflow.entities import Metric, Param
            from mlflow.exceptions import MlflowException
        except ImportError:
            raise ConfigError(f"--track mlflow: install it with {INSTALL}") from None
        self._metric = Metric
        groups = to_mapping(config)
        params = [
            Param(f"{group}.{key}", str(value))
            for group, values in groups.items()
            for key, value in (values.items() if isinstance(values, dict) else [("value", values)])
        ]
        try:
            self._client = MlflowClient()
            experiment = self._client.get_experiment_by_name("lockstep")
            number = experiment.experiment_id if experiment else self._client.create_experiment("lockstep")
            self._run = self._client.create_run(number, run_name=folder.name).info.run_id
            self._client.log_batch(self._run, params=params)
        except ImportError as error:
            raise ConfigError(f"--track mlflow: {first_line(error)}; {INSTALL}") from None
        except MlflowException as error:
            if error.error_code != "INVALID_PARAMETER_VALUE":  # such as an unreachable server: a restart may succeed
                raise
            fix = "set MLFLOW_TRACKING_URI to a server or a database"
            if find_spec("sqlalchemy") is None:
                fix = f"for a database, {INSTALL}; for a server, set MLFLOW_TRACKING_URI"
            raise ConfigError(f"--track mlflow: {first_line(error).strip()}; {fix}") from None

    def record(self, record: Record) -> None:
        metrics = [
            self._metric(tag, float(value), int(record["unix_time"] * 1000), record["step"])
            for tag, value in scalars(record).items()
        ]
        if metrics:
            self._client.log_batch(self._run, metrics=metrics)

    def close(self) -> None:
        self._client.set_terminated(self._run)


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


def build_trackers(
    config: TrainConfig, world: World, folder: RunFolder, position: Position, build_console: Callable[[], Tracker]
) -> list[Tracker]:
    """Build the configured trackers on rank 0; other ranks have none.

    Raises:
        ConfigError: A tracker's package is not installed.
    """
    if not world.is_main:
        return []
    console = build_console()

    def warn(line: str) -> None:
        console.say(line, ALWAYS)
        logger.info(line)  # not a warning, which would be printed again by a program that does not handle them

    records = RecordTracker(folder.metrics, position.step, position.is_before_evaluation, warn, folder.confirm)
    trackers: list[Tracker] = [records, console]
    if "tensorboard" in config.run.track:
        trackers.append(TensorBoardTracker(folder.path / "tensorboard", position.step, warn))
    if "mlflow" in config.run.track:
        trackers.append(MlflowTracker(config, folder.path))
    if "wandb" in config.run.track:
        trackers.append(WandbTracker(config, folder.path))
    return trackers
