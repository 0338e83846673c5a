"""Checkpoints: one folder a step, whole or not there, checked when read, and read without executing pickles.

`checkpoints/step-00000120/` holds

- `model.safetensors`: the weights, with architecture, class names and input in its metadata;
- `average.safetensors`: the moving average of the weights, where one is kept;
- `strategy.safetensors`: what gradient compression keeps from step to step, of all workers, where it keeps anything;
- `optimizer.safetensors`: the optimizer's tensors, named PARAMETER.NAME;
- `state.json`: everything that is no tensor (progress, loss scale, the optimizer's other values, what the job was);
- `manifest.json`: size and SHA-256 of each of these.

It is written under another name, synced and renamed. `checkpoints/best` is a link to the best by top-1.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from lockstep.errors import CheckpointError
from lockstep.untrusted import parse_json, read_json

FORMAT = 1
PREFIX = "step-"
PARTIAL = ".partial-"
METADATA_KEY = "lockstep"
MODEL_FILE = "model.safetensors"
AVERAGE_FILE = "average.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
STRATEGY_FILE = "strategy.safetensors"
OPTIONAL = (AVERAGE_FILE, STRATEGY_FILE)
STATE_FILE = "state.json"
MANIFEST_FILE = "manifest.json"

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Snapshot:
    """The state of a run after a step. `about` describes the model; `job` what a resumed run must share."""

    step: int
    model: Tensors
    optimizer: Mapping[str, Any]
    progress: Mapping[str, Any]
    about: Mapping[str, Any]
    job: Mapping[str, Any] = field(default_factory=dict)
    average: Tensors = field(default_factory=dict)
    strategy: Tensors = field(default_factory=dict)
    precision: Mapping[str, Any] = field(default_factory=dict)


class Checkpoints:
    """What a worker does that writes no checkpoints, because another has everything that it has: nothing."""

    def save(self, take: Callable[[], Snapshot], is_best: bool = False) -> None:
        """Write a checkpoint of what `take` returns."""

    def forget_after(self, step: int, best_step: int) -> None:
        """Drop the checkpoints of steps that a resumed run will take again."""

    def export_best(self, path: Path) -> None:
        """Write the best checkpoint's weights for use, as one file."""


class CheckpointFolder(Checkpoints):
    """The checkpoints of one run; the newest `keep` and the best are kept."""

    def __init__(self, folder: Path, keep: int):
        self.folder = folder
        self._keep = keep

    def save(self, take: Callable[[], Snapshot], is_best: bool = False) -> None:
        """Write a checkpoint and remove those that are no longer kept.

        Raises:
            CheckpointError: It cannot be written; the ones that were there still are.
        """
        snapshot = take()
        target = self.folder / _name_of(snapshot.step)
        partial = self.folder / f"{PARTIAL}{target.name}"
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            _write(partial, snapshot)
            if target.exists():  # a resumed run takes a step again that it had saved before
                self._remove(target)
            os.rename(partial, target)
            if is_best:
                self._point_best_at(target)
            _sync(self.folder)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise CheckpointError(
                f"checkpoint of step {snapshot.step} cannot be written to {self.folder}: {error}; the newest complete "
                f"one is {newest(self.folder) or 'none'}. Make room, then go on with --resume"
            ) from error
        for path in complete(self.folder)[: -self._keep]:
            if path.resolve() != (self.folder / "best").resolve():
                self._remove(path)

    def forget_after(self, step: int, best_step: int) -> None:
        """Drop the checkpoints of later steps, which a run resumed from `step` leaves behind, and set the best."""
        for path in complete(self.folder):
            if path.name > _name_of(step):
                self._remove(path)
        best = self.folder / _name_of(best_step)
        if best.is_dir():
            self._point_best_at(best)
        else:
            (self.folder / "best").unlink(missing_ok=True)

    def export_best(self, path: Path) -> None:
        """Write the best checkpoint's weights, or their moving average where one was kept."""
        best = load(best_or_newest(self.folder))
        export(path, averaged_or_plain(best), best.about)

    def _point_best_at(self, target: Path) -> None:
        link = self.folder / f"{PARTIAL}best"
        link.unlink(missing_ok=True)
        link.symlink_to(target.name)
        os.replace(link, self.folder / "best")

    def _remove(self, path: Path) -> None:
        doomed = path.with_name(PARTIAL + "old-" + path.name)
        shutil.rmtree(doomed, ignore_errors=True)
        os.rename(path, doomed)  # so that no half-removed checkpoint is ever taken for one
        shutil.rmtree(doomed, ignore_errors=True)


def _name_of(step: int) -> str:
    return f"{PREFIX}{step:08d}"


def complete(folder: Path) -> list[Path]:
    """The complete checkpoints in a `checkpoints` folder, oldest first."""
    return sorted(path.parent for path in folder.glob(f"{PREFIX}*/{MANIFEST_FILE}"))


def newest(folder: Path) -> Path | None:
    """The newest complete checkpoint in a `checkpoints` folder."""
    found = complete(folder)
    return found[-1] if found else None


def best_or_newest(folder: Path) -> Path:
    """The best checkpoint in a `checkpoints` folder; a resumed run in a new folder may have none but the newest.

    Raises:
        CheckpointError: There is none at all.
    """
    best = folder / "best"
    return best if (best / MANIFEST_FILE).is_file() else locate(folder)


def locate(path: Path) -> Path:
    """The checkpoint that a path means: a checkpoint's own folder, or the newest of a run.

    Raises:
        CheckpointError: There is none.
    """
    if (path / MANIFEST_FILE).is_file():
        return path
    found = newest(path / "checkpoints") or newest(path)
    if found is None:
        raise CheckpointError(
            f"{path} is no checkpoint and holds none; give a run folder or one of its checkpoints/{PREFIX}... folders"
        )
    return found


def run_folder_of(checkpoint: Path) -> Path:
    """The run that a checkpoint belongs to."""
    return checkpoint.resolve().parent.parent


def load(path: Path) -> Snapshot:
    """Read a checkpoint and check it against its manifest.

    Raises:
        CheckpointError: A file is missing or damaged; the message names it.
    """
    manifest = _read_json(path / MANIFEST_FILE)
    if manifest.get("format") != FORMAT:
        raise CheckpointError(f"{path} is of format {manifest.get('format')}, this Lockstep reads format {FORMAT}")
    files = manifest.get("files")
    if not isinstance(files, dict):
        raise CheckpointError(f"{path / MANIFEST_FILE} is damaged: it lists no files")
    for name in (MODEL_FILE, OPTIMIZER_FILE, STATE_FILE, *OPTIONAL):
        expected = files.get(name)
        if expected is None and name in OPTIONAL:
            continue
        if expected is None or _describe_file(path / name) != expected:
            raise CheckpointError(
                f"{path / name} is damaged: it is not as manifest.json says; resume from another checkpoint in "
                f"{path.parent}"
            )
    state = _read_json(path / STATE_FILE)
    try:
        average, strategy = (_read_tensors(path / name) if name in files else {} for name in OPTIONAL)
        return Snapshot(
            step=_count(state["step"]),
            model=_read_tensors(path / MODEL_FILE),
            optimizer=_join_optimizer(state["optimizer"], _read_tensors(path / OPTIMIZER_FILE)),
            progress=_mapping(state["progress"]),
            about=_mapping(state["about"]),
            job=_mapping(state["job"]),
            average=average,
            strategy=strategy,
            precision=_mapping(state.get("precision", {})),
        )
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise CheckpointError(f"{path} is not a Lockstep checkpoint of format {FORMAT}: {error!r}") from None


def export(path: Path, weights: Tensors, about: Mapping[str, Any]) -> None:
    """Write weights, with what is needed to use them, as one safetensors file."""
    partial = path.with_name(PARTIAL + path.name)
    save_file(weights, partial, metadata={METADATA_KEY: json.dumps(about)})
    os.replace(partial, path)


def load_model(path: Path) -> tuple[Tensors, dict[str, Any]]:
    """Weights for use, and what they belong to, from an exported file, a checkpoint or a run folder.

    A run folder means its exported model, if there is one, else its newest checkpoint. Where a moving average was
    kept, a checkpoint means the average.

    Raises:
        CheckpointError: There is nothing of that kind, or it is damaged.
    """
    if path.is_dir() and (path / MODEL_FILE).is_file() and not (path / MANIFEST_FILE).is_file():
        path = path / MODEL_FILE
    if path.is_dir() or not path.exists():
        snapshot = load(locate(path))
        return averaged_or_plain(snapshot), dict(snapshot.about)
    weights = _read_tensors(path)
    with safe_open(path, "pt") as file:
        text = (file.metadata() or {}).get(METADATA_KEY)
    if text is None:
        raise CheckpointError(f"{path} does not say which model it holds; give a file that Lockstep exported")
    try:
        return weights, dict(_mapping(parse_json(text)))
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{path} does not say which model it holds ({error})") from None


def averaged_or_plain(snapshot: Snapshot) -> Tensors:
    """The weights to use: the moving average's where one was kept."""
    prefix = "module."
    averaged = {name.removeprefix(prefix): t for name, t in snapshot.average.items() if name.startswith(prefix)}
    return averaged or snapshot.model


def _write(folder: Path, snapshot: Snapshot) -> None:
    scalars, tensors = _split_optimizer(snapshot.optimizer)
    save_file(snapshot.model, folder / MODEL_FILE, metadata={METADATA_KEY: json.dumps(snapshot.about)})
    save_file(tensors, folder / OPTIMIZER_FILE)
    for name, extra in ((AVERAGE_FILE, snapshot.average), (STRATEGY_FILE, snapshot.strategy)):
        if extra:
            save_file(extra, folder / name)
    state = {
        "format": FORMAT,
        "step": snapshot.step,
        "progress": snapshot.progress,
        "job": snapshot.job,
        "about": snapshot.about,
        "precision": snapshot.precision,
        "optimizer": scalars,
    }
    (folder / STATE_FILE).write_text(json.dumps(state, indent=2), encoding="utf-8")
    files = {path.name: _describe_file(path) for path in sorted(folder.iterdir())}
    (folder / MANIFEST_FILE).write_text(json.dumps({"format": FORMAT, "files": files}, indent=2), encoding="utf-8")
    for path in folder.iterdir():
        _sync(path)
    _sync(folder)


def _split_optimizer(state: Mapping[str, Any]) -> tuple[dict[str, Any], Tensors]:
    """An optimizer's state_dict as JSON and tensors."""
    tensors: Tensors = {}
    values: dict[str, dict[str, Any]] = {}
    for parameter, entries in state["state"].items():
        for name, value in entries.items():
            if isinstance(value, torch.Tensor):
                tensors[f"{parameter}.{name}"] = value.detach().cpu().contiguous()
            else:
                values.setdefault(str(parameter), {})[name] = value
    return {"groups": state["param_groups"], "values": values}, tensors


def _join_optimizer(scalars: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    state: dict[int, dict[str, Any]] = {}
    for parameter, entries in scalars["values"].items():
        state.setdefault(int(parameter), {}).update(_mapping(entries))
    for key, tensor in tensors.items():
        parameter, _, name = key.partition(".")
        state.setdefault(int(parameter), {})[name] = tensor
    groups = scalars["groups"]
    if not (isinstance(groups, list) and all(isinstance(_mapping(group).get("params"), list) for group in groups)):
        raise TypeError("the optimizer's groups list no parameters")
    return {"state": state, "param_groups": groups}


def _mapping(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise TypeError(f"a {type(value).__name__} where there should be a mapping")
    return value


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(f"{str(value)[:40]} is no number of steps")
    return value


def _read_tensors(path: Path) -> Tensors:
    try:
        return load_file(path)
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        raise CheckpointError(f"{path} cannot be read as safetensors: {error}") from None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = read_json(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} does not hold a JSON object")
    return value


def _describe_file(path: Path) -> dict[str, Any] | None:
    try:
        with path.open("rb") as file:
            return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
    except OSError:
        return None


def _sync(path: Path) -> None:
    """Have the kernel put a file, or a folder's list of names, on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
