"""Write, verify and read one checkpoint, without executing pickles.

The folder `step-00000120/` contains

- `model.safetensors`: the weights, with architecture, class names and input as metadata;
- `states.safetensors`: the tensors of all other states (the optimizer's state_dict, the moving average of the weights,
  what a user's own loop wants saved), named by where they are in them (`snapshot`);
- `state.json`: everything else (progress, the states' other values, the job's settings);
- of a model that is sharded over the workers (FSDP2's), `shard-00000.safetensors` and so on with each worker's parts,
  and `shards.json` (`sharded`);
- `manifest.json`: size and SHA-256 of each of these.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from lockstep.config.mapping import from_mapping
from lockstep.config.run_paths import MANIFEST_FILE
from lockstep.config.schema import MAX_BITS
from lockstep.data.sets import InputSpec
from lockstep.errors import CheckpointError, ConfigError, printable
from lockstep.files.atomic import replacing, sync
from lockstep.files.untrusted import open_plain, parse_json, read_json
from lockstep.models.saved_weights import read_safetensors
from lockstep.run.checkpoints import sharded
from lockstep.run.checkpoints.snapshot import Snapshot, Tensors, TensorShard, join_state, split_state

FORMAT = 1
METADATA_KEY = "lockstep"
MODEL_FILE = "model.safetensors"
STATES_FILE = "states.safetensors"
STATE_FILE = "state.json"
FILES = (MODEL_FILE, STATES_FILE, STATE_FILE)
KNOWN = (*FILES, sharded.INDEX_FILE)
MODEL, STATES = "model:", "states:"  # before the names of sharded tensors


def write(
    folder: Path, snapshot: Snapshot, durable: bool = True, wait_for_others: Callable[[], dict[str, Any]] | None = None
) -> None:
    """Write a checkpoint's files into an empty folder, and sync them to disk if `durable`.

    Args:
        wait_for_others: If the state is sharded, waits for the files of the other workers, and returns their
            descriptions by name.

    Raises:
        OSError: A file cannot be written.
    """
    tensors, values, shards = _separate(snapshot)
    model = {name: tensor for name, tensor in snapshot.model.items() if not isinstance(tensor, TensorShard)}
    _save_tensors(model, folder / MODEL_FILE, {METADATA_KEY: json.dumps(snapshot.about)})
    _save_tensors(tensors, folder / STATES_FILE)
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
    if shards or wait_for_others:
        own = sharded.file_of(0)
        files[own] = _write_shards(folder / own, shards, durable)
        files |= wait_for_others() if wait_for_others else {}
        sharded.write_index(folder, [name for name in files if name not in FILES])
        files[sharded.INDEX_FILE] = describe_file(folder / sharded.INDEX_FILE)
    (folder / MANIFEST_FILE).write_text(json.dumps({"format": FORMAT, "files": files}, indent=2), encoding="utf-8")
    if durable:
        for path in folder.iterdir():
            sync(path)
        sync(folder)


def _separate(snapshot: Snapshot) -> tuple[Tensors, Any, dict[str, TensorShard]]:
    """Return the whole tensors of a snapshot's states, their other values, and all shards, the model's too."""
    found: dict[str, Any] = {}
    values = split_state(snapshot.states, "", found)
    tensors = {
        name: each.detach().cpu().contiguous() for name, each in found.items() if not isinstance(each, TensorShard)
    }
    named = [(MODEL, name, each) for name, each in snapshot.model.items()]
    named += [(STATES, name, each) for name, each in found.items()]
    return tensors, values, {prefix + name: each for prefix, name, each in named if isinstance(each, TensorShard)}


def write_own_shards(path: Path, snapshot: Snapshot, durable: bool) -> dict[str, Any]:
    """Write the file of a worker other than rank 0; return its size and SHA-256.

    Raises:
        OSError: The file cannot be written.
    """
    return _write_shards(path, _separate(snapshot)[2], durable)


def _write_shards(path: Path, shards: Mapping[str, TensorShard], durable: bool) -> dict[str, Any]:
    stored = {name: each for name, each in shards.items() if each.is_stored}
    tensors = {name: each.tensor.contiguous() for name, each in stored.items()}
    _save_tensors(tensors, path, sharded.describe_parts(stored))
    if durable:
        sync(path)
    if (description := describe_file(path)) is None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
    return description


def verify(path: Path, shards_too: bool = True) -> dict[str, Any]:
    """Compare a checkpoint's files with its manifest, and return that: all sizes first, then all contents.

    Args:
        shards_too: Whether to read the contents of the workers' parts.

    Raises:
        CheckpointError: A file is missing or damaged; the message names it.
    """
    files = _read_manifest(path)
    for wrong in (_has_other_size, _has_other_content):
        for name in files:
            if sharded.is_shard_file(name) and wrong is _has_other_content and not shards_too:
                continue
            if wrong(path / name, files[name]):
                raise CheckpointError(
                    f"{path / name} is damaged: it does not match manifest.json; resume from another checkpoint in "
                    f"{path.parent}"
                )
    return files


def load(path: Path, verified: bool = False, to_shard: bool = False) -> Snapshot:
    """Read a checkpoint after verifying it, unless it is already `verified`.

    Args:
        to_shard: Leave sharded tensors in the files, as `StoredTensor`s, and believe the worker that chose the
            checkpoint that their contents are undamaged.

    Raises:
        CheckpointError: A file is missing or damaged; the message names it.
    """
    files = _read_manifest(path) if verified else verify(path, shards_too=not to_shard)
    parts: dict[str, Any] = dict(sharded.read_index(path, files)) if sharded.INDEX_FILE in files else {}
    if not to_shard:
        parts = {name: each.whole() for name, each in parts.items()}
    model, tensors = read_safetensors(path / MODEL_FILE), read_safetensors(path / STATES_FILE)
    for prefix, whole in ((MODEL, model), (STATES, tensors)):
        whole |= {name.removeprefix(prefix): each for name, each in parts.items() if name.startswith(prefix)}
    state = _read_json(path / STATE_FILE)
    try:
        return Snapshot(
            step=_count(state["step"]),
            model=model,
            states=_mapping(join_state(state["states"], tensors)),
            progress=_mapping(state["progress"]),
            about=_mapping(state["about"]),
            job=_mapping(state["job"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise CheckpointError(f"{path} is not a Lockstep checkpoint of format {FORMAT}: {error!r}") from None


def read_entry(path: Path, name: Literal["progress", "about"]) -> Mapping[str, Any]:
    """Read the progress of a checkpoint alone, or the description of its model.

    Raises:
        CheckpointError: The file is missing or damaged.
    """
    try:
        return _mapping(_read_json(path / STATE_FILE)[name])
    except (KeyError, TypeError) as error:
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
    """Return the size and SHA-256 of a checkpoint's files by name."""
    manifest = _read_json(path / MANIFEST_FILE)
    if manifest.get("format") != FORMAT:
        raise CheckpointError(f"{path} has format {manifest.get('format')}, but this Lockstep reads format {FORMAT}")
    files = manifest.get("files")
    if not isinstance(files, dict):
        raise CheckpointError(f"{path / MANIFEST_FILE} is damaged: it lists no files")
    if unknown := [name for name in files if not (name in KNOWN or sharded.is_shard_file(name))]:
        raise CheckpointError(f"{path / MANIFEST_FILE} is damaged: it lists {printable(unknown[0])}")
    for name in {**dict.fromkeys(FILES), **files}:
        known = files.get(name)
        if not (isinstance(known, dict) and type(known.get("bytes")) is int and _is_sha256(known.get("sha256"))):
            raise CheckpointError(
                f"{path / MANIFEST_FILE} is damaged: it lacks the size or SHA-256 of {name}; resume from another "
                f"checkpoint in {path.parent}"
            )
    return files


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
            TypeError, ValueError: A value is missing, unknown, of the wrong type, or out of range.
        """
        try:
            about = from_mapping(cls, values, "metadata")
        except ConfigError as error:
            raise ValueError(str(error)[:200]) from None  # it quotes the value, which may be long
        spec = about.input
        if not 1 <= len(about.classes) <= MAX_CLASSES:
            raise ValueError(f"{len(about.classes):,} classes; expected 1 to {MAX_CLASSES:,}")
        for name, most in (("channels", MAX_CHANNELS), ("height", MAX_SIDE), ("width", MAX_SIDE), ("bits", MAX_BITS)):
            if (value := getattr(spec, name)) is not None and not 1 <= value <= most:
                raise ValueError(f"invalid input {name}: {value}")
        fits = len(spec.mean) == len(spec.std) == spec.channels and all(spec.std) and 0 < spec.crop_ratio <= 1
        if not (fits and all(map(math.isfinite, (*spec.mean, *spec.std)))):
            raise ValueError(f"invalid mean, std or crop_ratio: {spec.mean}, {spec.std}, {spec.crop_ratio}"[:200])
        return about
