"""Resume from an older script's checkpoint, or at the epoch given by --start-epoch.

Both start a new run folder, whose records do not contain the earlier epochs.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from torch import nn

from lockstep.config.schema import TrainConfig
from lockstep.errors import ConfigError
from lockstep.train.checkpoints.legacy_format import load_weights, read
from lockstep.train.metrics import Totals
from lockstep.train.progress import Progress


def take_over(path: Path, config: TrainConfig, model: nn.Module, steps_per_epoch: int) -> tuple[Progress, list[str]]:
    """Restore an older script's weights and its number of finished epochs; the optimizer starts without state.

    Returns:
        The progress, and lines to print on what was restored and what was not.

    Raises:
        CheckpointError: The file cannot be read, or its weights do not fit the model.
    """
    old = read(path)
    load_weights(old, model, config.model.arch)
    epochs = old.epochs or 0
    best = f", best top-1 {100 * old.top1:.2f} %" if old.top1 is not None else ""
    lines = [f"weights from {path}: {epochs} epochs finished{best}"]
    if old.epochs is None:
        lines[0] = f"weights from {path}, which does not record the number of finished epochs; add --start-epoch N"
    if epochs >= config.epochs and config.run.start_epoch is None:
        lines.append(f"no epochs left to train (--epochs {config.epochs}): evaluating the weights as they are")
    lines.append("the optimizer starts without the file's state, momentum at zero")
    return Progress(step=epochs * steps_per_epoch), lines


def begin_at(progress: Progress, config: TrainConfig, steps_per_epoch: int) -> Progress:
    """Return the progress at --start-epoch, or the same object if that changes nothing.

    Raises:
        ConfigError: The run ends before that epoch.
    """
    start = config.run.start_epoch
    if start is None or start * steps_per_epoch == progress.step:
        return progress
    if start > config.epochs:
        raise ConfigError(f"--start-epoch {start} is past the last epoch, --epochs {config.epochs}")
    return replace(
        progress,
        step=start * steps_per_epoch,
        skipped_steps=0,
        skipped_in_a_row=0,
        epoch_totals=Totals(),
        epoch_seconds=0.0,
        epoch_wait_seconds=0.0,
        epoch_excluded_seconds=0.0,
        best_top1=-1.0,
        best_step=0,
    )
