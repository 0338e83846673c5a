"""The folder of a run: config.yaml, environment.json, metrics.jsonl, io/, tensorboard/, checkpoints/, logs/."""

from __future__ import annotations

import logging
import re
import time
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from lockstep.config import TrainConfig
from lockstep.config_mapping import to_mapping
from lockstep.errors import ConfigError
from lockstep.records import write_json
from lockstep.train import checkpoint
from lockstep.train.environment import describe_environment
from lockstep.world import World

RUNS = Path("runs")
LOGGERS = ("lockstep", "py.warnings")
logger = logging.getLogger("lockstep")


@dataclass(frozen=True)
class RunFolder:
    """Where each part of a run lies."""

    path: Path

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def model(self) -> Path:
        return self.path / "model.safetensors"

    def log(self, rank: int) -> Path:
        return self.path / "logs" / f"worker-{rank}.log"

    def create(self, config: TrainConfig, world: World) -> None:
        """Make the folder and write what the run was started with.

        Raises:
            ConfigError: The folder cannot be made or written to.
        """
        try:
            (self.path / "logs").mkdir(parents=True, exist_ok=True)
            repeatable = replace(
                config,
                run=replace(config.run, run_dir=None, resume=None, evaluate=False, start_epoch=None, time_limit=None),
            )
            text = yaml.safe_dump(to_mapping(repeatable), sort_keys=False)
            (self.path / "config.yaml").write_text(text, encoding="utf-8")
            write_json(self.path / "environment.json", describe_environment(world))
        except OSError as error:
            raise ConfigError(
                f"run folder {self.path} cannot be written: {error}; choose another with --run-dir"
            ) from None


def new_run_path(config: TrainConfig) -> Path:
    """A name for a new run: runs/DATASET-ARCH-TIME, not yet taken."""
    stem = RUNS / f"{_slug(config)}{time.strftime('%Y%m%d-%H%M%S')}"
    path, number = stem, 1
    while path.exists():
        number += 1
        path = stem.with_name(f"{stem.name}-{number}")
    return path


def newest_run_path(config: TrainConfig) -> Path | None:
    """The newest run of the same data set and architecture that has a checkpoint."""
    name = re.compile(re.escape(_slug(config)) + r"\d{8}-\d{6}(-\d+)?")
    runs = [path for path in RUNS.glob("*") if name.fullmatch(path.name)]
    found = [newest for path in runs if (newest := checkpoint.newest(path / "checkpoints"))]
    latest = max(found, key=lambda path: path.stat().st_mtime, default=None)
    return latest.parent.parent if latest else None


def _slug(config: TrainConfig) -> str:
    """DATASET-ARCH- in letters that any file system takes; of a path or a MODULE:NAME, the last part."""
    words = (config.data.source, config.model.arch)
    names = (re.split(r"[:/]", word.rstrip("/"))[-1] for word in words)
    return "".join(re.sub(r"[^\w.-]", "_", name) + "-" for name in names)


def start_log(path: Path, rank: int) -> logging.Handler:
    """Send this worker's log, and Python's warnings, to a file of its own; an earlier run's file gets no more."""
    for earlier in [handler for handler in logger.handlers if isinstance(handler, logging.FileHandler)]:
        for name in LOGGERS:
            logging.getLogger(name).removeHandler(earlier)
        earlier.close()
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter(f"%(asctime)s worker {rank} %(levelname)s %(message)s"))
    for name in LOGGERS:
        logging.getLogger(name).addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logging.captureWarnings(True)
    return handler
