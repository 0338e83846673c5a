"""Resume from an older script's checkpoint, or at the epoch given by --start-epoch.

Both start a new run folder, whose records do not contain the earlier epochs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import nn, optim
from torch.distributed.optim import ZeroRedundancyOptimizer

from lockstep.config.schema import TrainConfig
from lockstep.errors import ConfigError
from lockstep.train.checkpoints.legacy_format import load_weights, read
from lockstep.train.metrics import Totals
from lockstep.train.optim.build import load_keeping_flags
from lockstep.train.progress import Progress

# The state of each optimizer per parameter, under torch's names.
REMEMBERED: dict[type[optim.Optimizer], set[str]] = {
    optim.SGD: {"momentum_buffer"},
    optim.Adam: {"step", "exp_avg", "exp_avg_sq"},
    optim.AdamW: {"step", "exp_avg", "exp_avg_sq"},
}


def take_over(
    path: Path, config: TrainConfig, model: nn.Module, optimizer: optim.Optimizer, steps_per_epoch: int
) -> tuple[Progress, list[str]]:
    """Restore an older script's state.

    Returns:
        The progress, and lines to print on what was restored and what was not.

    Raises:
        CheckpointError: The file cannot be read, or its weights do not fit the model.
    """
    old = read(path)
    load_weights(old, model, config.model.arch)
    obstacle = take_over_optimizer(old.optimizer, model, optimizer)
    epochs = old.epochs or 0
    best = f", best top-1 {100 * old.top1:.2f} %" if old.top1 is not None else ""
    lines = [f"weights from {path}: {epochs} epochs finished{best}"]
    if old.epochs is None:
        lines[0] = f"weights from {path}, which does not record the number of finished epochs; add --start-epoch N"
    if epochs >= config.epochs and config.run.start_epoch is None:
        lines.append(f"no epochs left to train (--epochs {config.epochs}): evaluating the weights as they are")
    lines.append(
        f"optimizer state not restored: {obstacle}" if obstacle else f"optimizer state restored from {path.name}"
    )
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


def take_over_optimizer(state: Mapping[str, Any] | None, model: nn.Module, optimizer: optim.Optimizer) -> str:
    """Load an old optimizer's state, matched by the order of the parameters; values set by flags are kept.

    Returns:
        The reason why the state does not fit, with the optimizer unchanged; "" on success.
    """
    if state is None:
        return "the file has no optimizer state"
    # --shard-optimizer wraps the optimizer of this worker's shard.
    kind = type(optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer)
    remembered = next((names for each, names in REMEMBERED.items() if issubclass(kind, each)), None)
    if remembered is None:
        return f"older scripts have no state for {kind.__name__}"
    try:
        entries = _in_order(state)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        return f"the file's state has an unknown form ({error!r})"
    if not any(entries):
        return "the file has no optimizer state"
    ours = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    order = _places(entries, _group_sizes(state), model, optimizer, ours)
    if order is None:
        return "the file's parameter groups, or the number or shapes of its parameters, differ"
    foreign = {name for entry in entries for name in entry if entry[name] is not None} - remembered
    if foreign:
        return f"the file's state is from another optimizer (it has {', '.join(sorted(foreign))})"
    taken = {place: _with_tensor_step(entry) for place, entry in zip(order, entries, strict=True) if entry}
    load_keeping_flags(optimizer, {"state": taken, "param_groups": _numbered_groups(optimizer)})
    return ""


def _with_tensor_step(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return a parameter's state with `step` as a tensor; before torch 1.12 it was a number."""
    return {
        name: torch.tensor(float(value), device="cpu") if name == "step" and isinstance(value, int | float) else value
        for name, value in entry.items()
    }


def _numbered_groups(optimizer: optim.Optimizer) -> list[dict[str, Any]]:
    """Return the groups as in state_dict(), which a sharded optimizer supports only after gathering all states."""
    number = count()
    return [{**group, "params": [next(number) for _ in group["params"]]} for group in optimizer.param_groups]


def _group_sizes(state: Mapping[str, Any]) -> list[int]:
    return [len(group["params"]) for group in state["param_groups"]]


def _in_order(state: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the state of each parameter, in order; torch before 1.5 used addresses as keys."""
    keys = [key for group in state["param_groups"] for key in group["params"]]
    entries = [state["state"].get(key, {}) for key in keys]
    if not all(isinstance(entry, Mapping) for entry in entries):
        raise TypeError("an entry is not a dictionary")
    return entries


def _places(
    entries: Sequence[Mapping[str, Any]],
    sizes: list[int],
    model: nn.Module,
    optimizer: optim.Optimizer,
    ours: Sequence[torch.Tensor],
) -> list[int] | None:
    """Return the index in our optimizer of each parameter in the file; None if they cannot be matched."""
    if len(entries) != len(ours):
        return None
    places = list(range(len(ours)))
    if sizes != [len(group["params"]) for group in optimizer.param_groups]:
        if len(sizes) != 1:
            return None
        number = {id(parameter): place for place, parameter in enumerate(ours)}
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if any(id(parameter) not in number for parameter in trained):
            return None
        places = [number[id(parameter)] for parameter in trained]
    fits = all(
        value.shape == ours[place].shape
        for place, entry in zip(places, entries, strict=True)
        for name, value in entry.items()
        if isinstance(value, torch.Tensor) and name != "step"
    )
    return places if fits else None
