"""The run folder: config.yaml, environment.json, metrics.jsonl, io/, tensorboard/, checkpoints/, logs/."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from lockstep.config.mapping import to_mapping
from lockstep.config.run_names import runs_of
from lockstep.config.schema import TrainConfig
from lockstep.errors import ConfigError
from lockstep.files.atomic import replacing
from lockstep.files.jsonl import write_json
from lockstep.files.output import say
from lockstep.files.resilient_file import ResilientFile
from lockstep.train.checkpoints import checkpoint_folder
from lockstep.train.monitoring.environment import describe_environment
from lockstep.world.world import World

LOGGERS = ("lockstep", "py.warnings")
logger = logging.getLogger("lockstep")


@dataclass(frozen=True)
class RunFolder:
    """Paths of the files in a run folder."""

    path: Path

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def earlier(self) -> Path:
        """Records of earlier epochs, if the run was resumed from another folder."""
        return self.path / "earlier.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def model(self) -> Path:
        return self.path / "model.safetensors"

    def log(self, rank: int) -> Path:
        return self.path / "logs" / f"worker-{rank}.log"

    def create(self, config: TrainConfig, world: World) -> None:
        """Create the folder, and write the configuration and the environment.

        Raises:
            ConfigError: The folder cannot be created or written to.
        """
        try:
            (self.path / "logs").mkdir(parents=True, exist_ok=True)
            text = yaml.safe_dump(to_mapping(_repeatable(config)), sort_keys=False)
            with replacing(self.path / "config.yaml") as partial:  # writing to a pipe at this path would block
                partial.write_text(text, encoding="utf-8")
            write_json(self.path / "environment.json", describe_environment(world))
        except OSError as error:
            raise ConfigError(
                f"run folder {self.path} cannot be written: {error}; choose another with --run-dir"
            ) from None


def _repeatable(config: TrainConfig) -> TrainConfig:
    """Return the configuration without settings that apply to a single start."""
    run = replace(config.run, run_dir=None, resume=None, start_epoch=None, evaluate=False, time_limit=None)
    return replace(config, run=replace(run, quiet=False, verbose=False))


def newest_run_path(config: TrainConfig) -> Path | None:
    """Return the newest run of the same data set and architecture that has a checkpoint."""
    found = [newest for path in runs_of(config) if (newest := checkpoint_folder.newest(path / "checkpoints"))]
    latest = max(found, key=lambda path: path.stat().st_mtime, default=None)
    return latest.parent.parent if latest else None


class LogFile(logging.FileHandler):
    """A worker's log file that tolerates a full disk without an error message per line."""

    def __init__(self, path: Path):
        super().__init__(path, encoding="utf-8", delay=True)
        self._is_closed = False
        self._file = ResilientFile(path, _print_to_stderr)

    def emit(self, record: logging.LogRecord) -> None:
        self._file.write(self.format(record))

    def close(self) -> None:
        if not self._is_closed:  # also called at interpreter exit
            self._is_closed = True
            self._file.close()
        super().close()


def _print_to_stderr(line: str) -> None:
    say(f"lockstep: {line}")


def run_of(path: Path) -> Path:
    """Return the run folder of a checkpoint, or the run folder itself.

    Raises:
        CheckpointError: There is no checkpoint.
    """
    return checkpoint_folder.run_folder_of(checkpoint_folder.locate(path))


def start_log(path: Path, rank: int) -> logging.Handler:
    """Write this worker's log and Python's warnings to a file, instead of an earlier run's file.

    Raises:
        ConfigError: The file cannot be opened.
    """
    for earlier in [handler for handler in logger.handlers if isinstance(handler, logging.FileHandler)]:
        for name in LOGGERS:
            logging.getLogger(name).removeHandler(earlier)
        earlier.close()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handler = LogFile(path)
    except OSError as error:
        way_out = "fix that, or choose another --run-dir"
        raise ConfigError(f"{path} cannot be written: {error.strerror}; {way_out}") from None
    handler.setFormatter(logging.Formatter(f"%(asctime)s worker {rank} %(levelname)s %(message)s"))
    for name in LOGGERS:
        logging.getLogger(name).addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logging.captureWarnings(True)
    return handler
