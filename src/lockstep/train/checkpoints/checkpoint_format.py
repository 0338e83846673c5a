"""Write, verify and read one checkpoint, without executing pickles.

The folder `step-00000120/` contains

- `model.safetensors`: the weights, with architecture, class names and input as metadata;
- `states.safetensors`: the tensors of all other states (the optimizer's state_dict, the moving average of the weights,
  what a user's own loop wants saved), named by where they are in them (`state_tree`);
- `state.json`: everything else (progress, the states' other values, the job's settings);
- `manifest.json`: size and SHA-256 of each of these.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from lockstep.config.run_paths import MANIFEST_FILE
from lockstep.data.sets import InputSpec
from lockstep.errors import CheckpointError
from lockstep.files.atomic import replacing, sync
from lockstep.files.untrusted import open_plain, parse_json, read_json
from lockstep.models.saved_weights import read_safetensors
from lockstep.train.checkpoints import state_tree
from lockstep.train.checkpoints.snapshot import Snapshot, Tensors

FORMAT = 1
METADATA_KEY = "lockstep"
MODEL_FILE = "model.safetensors"
STATES_FILE = "states.safetensors"
STATE_FILE = "state.json"
FILES = (MODEL_FILE, STATES_FILE, STATE_FILE)


def write(folder: Path, snapshot: Snapshot, durable: bool = True) -> None:
    """Write a checkpoint's files into an empty folder, and sync them to disk if `durable`.

    Raises:
        OSError: A file cannot be written.
    """
    tensors: Tensors = {}
    values = state_tree.split(snapshot.states, "", tensors)
    _save_tensors(snapshot.model, folder / MODEL_FILE, {METADATA_KEY: json.dumps(snapshot.about)})
    _save_tensors({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, folder / STATES_FILE)
    state = {
        "format": FORMAT,
        "step": snapshot.step,
        "progress": snapshot.progress,
        "job": snapshot.job,
        "about": snapshot.about,
        "states": values,
    }
    (folder / STATE_FILE).write_text(json.dumps(state, indent=2), encoding="utf-8")
    files = {name: describe_file(folder / name) for name in sorted(FILES)}
    (folder / MANIFEST_FILE).write_text(json.dumps({"format": FORMAT, "files": files}, indent=2), encoding="utf-8")
    if durable:
        for path in folder.iterdir():
            sync(path)
        sync(folder)


def verify(path: Path) -> None:
    """Compare a checkpoint's files with its manifest: all sizes first, then all contents.

    Raises:
        CheckpointError: A file is missing or damaged; the message names it.
    """
    files = _read_manifest(path)["files"]
    for wrong in (_has_other_size, _has_other_content):
        for name in FILES:
            if wrong(path / name, files[name]):
                raise CheckpointError(
                    f"{path / name} is damaged: it does not match manifest.json; resume from another checkpoint in "
                    f"{path.parent}"
                )


def load(path: Path, verified: bool = False) -> Snapshot:
    """Read a checkpoint after verifying it, unless it is already `verified`.

    Raises:
        CheckpointError: A file is missing or damaged; the message names it.
    """
    if not verified:
        verify(path)
    state = _read_json(path / STATE_FILE)
    try:
        return Snapshot(
            step=_count(state["step"]),
            model=read_safetensors(path / MODEL_FILE),
            states=_mapping(state_tree.join(state["states"], read_safetensors(path / STATES_FILE))),
            progress=_mapping(state["progress"]),
            about=_mapping(state["about"]),
            job=_mapping(state["job"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise CheckpointError(f"{path} is not a Lockstep checkpoint of format {FORMAT}: {error!r}") from None


def export(path: Path, weights: Tensors, about: Mapping[str, Any]) -> None:
    """Write weights and their metadata as one safetensors file, atomically.

    Raises:
        OSError: The file cannot be written.
    """
    with replacing(path) as partial:
        _save_tensors(weights, partial, {METADATA_KEY: json.dumps(about)})


def read_exported(path: Path) -> tuple[Tensors, dict[str, Any]]:
    """Read weights and their metadata from a file written by `export`, or from a checkpoint's model file.

    Raises:
        CheckpointError: The file cannot be read, or has no valid metadata.
    """
    weights = read_safetensors(path)
    with safe_open(path, "pt") as file:
        text = (file.metadata() or {}).get(METADATA_KEY)
    if text is None:
        raise CheckpointError(f"{path} has no Lockstep metadata; name a file that Lockstep exported")
    try:
        return weights, dict(_mapping(parse_json(text)))
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: invalid model metadata: {error}") from None


def _has_other_size(path: Path, expected: Mapping[str, Any]) -> bool:
    try:
        return bool(path.stat().st_size != expected["bytes"])
    except OSError:
        return True


def _has_other_content(path: Path, expected: Mapping[str, Any]) -> bool:
    return describe_file(path) != expected


def describe_file(path: Path) -> dict[str, Any] | None:
    """Return a file's size and SHA-256; None if it cannot be read."""
    try:
        with open_plain(path) as file:
            return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
    except (OSError, ValueError):
        return None


def _save_tensors(tensors: Tensors, path: Path, metadata: dict[str, str] | None = None) -> None:
    path.touch()
    mode = path.stat().st_mode  # as set by the umask; safetensors replaces the file by a private one
    try:
        save_file(tensors, path, metadata=metadata)
        path.chmod(mode)
    except SafetensorError as error:  # contains the system's error number only as text
        number = re.search(r"os error (\d+)", str(error))
        code = int(number.group(1)) if number else errno.EIO
        raise OSError(code, os.strerror(code) if number else str(error), str(path)) from error


def _mapping(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise TypeError(f"expected a mapping, found a {type(value).__name__}")
    return value


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(f"invalid step count: {str(value)[:40]}")
    return value


def _read_manifest(path: Path) -> dict[str, Any]:
    manifest = _read_json(path / MANIFEST_FILE)
    if manifest.get("format") != FORMAT:
        raise CheckpointError(f"{path} has format {manifest.get('format')}, but this Lockstep reads format {FORMAT}")
    files = manifest.get("files")
    if not isinstance(files, dict):
        raise CheckpointError(f"{path / MANIFEST_FILE} is damaged: it lists no files")
    for name in FILES:
        known = files.get(name)
        if not (isinstance(known, dict) and type(known.get("bytes")) is int and _is_sha256(known.get("sha256"))):
            raise CheckpointError(
                f"{path / MANIFEST_FILE} is damaged: it lacks the size or SHA-256 of {name}; resume from another "
                f"checkpoint in {path.parent}"
            )
    return manifest


def _is_sha256(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) is not None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = read_json(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} does not contain a JSON object")
    return value


MAX_CLASSES = 1_000_000  # 4 MB of logits per image
MAX_SIDE = 16_384  # pixels
MAX_CHANNELS = 1_024


@dataclass(frozen=True)
class About:
    """Architecture, class names, input, and the data set that it was trained on."""

    arch: str
    classes: tuple[str, ...]
    input: InputSpec
    data: str = ""

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> About:
        """Parse the metadata of an exported file or a checkpoint.

        Raises:
            KeyError, TypeError, ValueError: A value is missing, of the wrong type, or out of range.
        """
        classes, data = values["classes"], values.get("data", "")
        if not (isinstance(values["arch"], str) and isinstance(data, str)):
            raise TypeError("arch or data is not a string")
        if not isinstance(classes, list) or not all(isinstance(name, str) for name in classes):
            raise TypeError("classes is not a list of strings")
        if not 1 <= len(classes) <= MAX_CLASSES:
            raise ValueError(f"{len(classes):,} classes; expected 1 to {MAX_CLASSES:,}")
        return cls(values["arch"], tuple(classes), _input(values["input"]), data)


def _input(values: Mapping[str, Any]) -> InputSpec:
    if not isinstance(values, Mapping) or not all(isinstance(values[name], list) for name in ("mean", "std")):
        raise TypeError("input is not a mapping with lists mean and std")
    spec = InputSpec(**{**values, "mean": tuple(values["mean"]), "std": tuple(values["std"])})
    for name, most in (("channels", MAX_CHANNELS), ("height", MAX_SIDE), ("width", MAX_SIDE)):
        value = getattr(spec, name)
        if type(value) is not int or not 1 <= value <= most:
            raise ValueError(f"invalid input {name}: {str(value)[:40]}")
    figures = (*spec.mean, *spec.std, spec.crop_ratio)
    if not all(type(figure) in (int, float) and abs(figure) < math.inf for figure in figures):
        raise ValueError("mean, std or crop_ratio is not a number")
    if not len(spec.mean) == len(spec.std) == spec.channels or not all(spec.std) or not 0 < spec.crop_ratio <= 1:
        raise ValueError(f"invalid mean, std or crop_ratio: {spec.mean}, {spec.std}, {spec.crop_ratio}"[:200])
    return spec
