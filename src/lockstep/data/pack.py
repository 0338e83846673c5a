"""Packing a folder of images: what goes into which shard, planned first, then written by all cores and resumable."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.data.encode import Encoding
from lockstep.data.listing import list_images, validation_folder
from lockstep.data.packed import (
    INDEX_FILE,
    MANIFEST_FILE,
    ROW,
    SPLITS,
    UNFINISHED_FILE,
    Manifest,
    PackedPart,
    Shard,
    is_packed,
)
from lockstep.data.processes import Advance, run_all
from lockstep.data.sets import FileSplit
from lockstep.data.shards import Item, ShardRecord, ShardTask, write_shard
from lockstep.errors import ConfigError, DataError
from lockstep.records import write_json


@dataclass(frozen=True)
class PackPlan:
    """A folder's packing: the same folder and settings always make the same plan, on any machine."""

    out: Path
    name: str
    classes: tuple[str, ...]
    settings: dict[str, Any]
    source: str
    tasks: dict[str, list[ShardTask]]

    @property
    def samples(self) -> int:
        return sum(len(task.items) for tasks in self.tasks.values() for task in tasks)


def make_plan(
    folder: Path, out: Path, encoding: Encoding, shard_bytes: int = 128 << 20, skip_corrupt: bool = False
) -> PackPlan:
    """Plan the shards of a folder; nothing is written.

    Args:
        shard_bytes: A shard ends where its source files together reach this.

    Raises:
        DataError: The folder holds no images as `lockstep train` reads them.
        ConfigError: `out` cannot be where the pack goes.
    """
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder; name one with train/ and val/ (or test/)")
    _check_places(folder, out)
    classes, *file_splits = list_images(folder)
    roots = folder / "train", validation_folder(folder)
    digest = hashlib.sha256()
    tasks = {}
    for name, root, split in zip(SPLITS, roots, file_splits, strict=True):
        sizes = _sizes(split, folder, digest)
        files = zip(split.paths, _keys(split, root), split.labels, strict=True)
        items = [Item(str(path), key, label) for path, key, label in files]
        tasks[name] = [
            ShardTask(out / name / f"{name}-{number:06d}.tar", tuple(items[start:end]), encoding, skip_corrupt)
            for number, (start, end) in enumerate(_cut(sizes, shard_bytes))
        ]
    settings = {**asdict(encoding), "shard_bytes": shard_bytes, "skip_corrupt": skip_corrupt}
    return PackPlan(out, folder.resolve().name, classes, settings, digest.hexdigest(), tasks)


def _check_places(folder: Path, out: Path) -> None:
    if is_packed(folder):
        raise DataError(f"{folder} is packed already; name the folder of images that it came from")
    source, target = folder.resolve(), out.resolve()
    if target.is_relative_to(source) or source.is_relative_to(target):
        raise ConfigError(f"OUT {out} and FOLDER {folder} lie in each other; name another OUT")
    if out.exists() and not out.is_dir():
        raise ConfigError(f"OUT {out} is a file; name a new folder")
    if out.is_dir() and any(out.iterdir()) and not (out / UNFINISHED_FILE).exists() and not is_packed(out):
        raise ConfigError(f"OUT {out} holds other things; name a new folder")


def _sizes(split: FileSplit, folder: Path, digest: hashlib._Hash) -> list[int]:
    """The files' sizes; into the digest goes all that a change of the folder would change."""
    sizes = []
    for path in split.paths:
        facts = path.stat()
        sizes.append(facts.st_size)
        line = f"{path.relative_to(folder)}\0{facts.st_size}\0{facts.st_mtime_ns}\n"
        digest.update(line.encode("utf-8", "surrogateescape"))
    return sizes


def _keys(split: FileSplit, root: Path) -> Iterator[str]:
    """Members' names without extension, CLASS/..., each once.

    WebDataset ends a key at the first dot of its base name; so dots in it become %2E, and % itself %25. Where files
    differ in nothing but their extension, it belongs to their keys.
    """
    stems = Counter(path.with_suffix("") for path in split.paths)
    for path in split.paths:
        base = path.name if stems[path.with_suffix("")] > 1 else path.stem
        folder = path.parent.relative_to(root)
        yield str(folder / base.replace("%", "%25").replace(".", "%2E"))


def _cut(sizes: Sequence[int], limit: int) -> Iterator[tuple[int, int]]:
    """Cut a list of sizes into runs (start, end), each of which ends where it reaches the limit."""
    start = total = 0
    for end, size in enumerate(sizes, 1):
        total += size
        if total >= limit or end == len(sizes):
            yield start, end
            start, total = end, 0


def write(plan: PackPlan, processes: int, advance: Advance) -> Manifest:
    """Write what is not there yet, and return the pack's description.

    Raises:
        DataError: It cannot be written, an image cannot be read, or a process was killed; the same call goes on.
        CorruptImageError: An image had to be decoded and cannot be.
        ConfigError: The pack there was begun from other files or with other settings.
    """
    if (plan.out / MANIFEST_FILE).exists():
        manifest = Manifest.read(plan.out)
        _check_same(plan, manifest.settings, manifest.source)
        _remove_traces(plan)
        advance(plan.samples)
        return manifest
    try:
        plan.out.mkdir(parents=True, exist_ok=True)
        with _alone(plan.out):
            _begin(plan)
            for name in SPLITS:
                (plan.out / name).mkdir(exist_ok=True)
            _write_shards(plan, processes, advance)
            parts = {name: _write_index(plan.out / name, plan.tasks[name]) for name in SPLITS}
            manifest = Manifest(plan.name, plan.classes, plan.settings, plan.source, parts)
            manifest.write(plan.out)
            _remove_traces(plan)
    except OSError as error:
        raise DataError(f"{plan.out} cannot be written ({error}); mend that and run the same command again") from None
    return manifest


@contextmanager
def _alone(out: Path) -> Iterator[None]:
    """Hold the pack against a second writer, for as long as this process lives."""
    folder = os.open(out, os.O_RDONLY)
    try:
        _lock(folder, out)
        yield
    finally:
        os.close(folder)


def _lock(folder: int, out: Path) -> None:
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(f"another `lockstep data pack` is writing {out}; wait for it, or name another OUT") from None
    except OSError:
        pass  # a file system without locks, such as Lustre may be


def _begin(plan: PackPlan) -> None:
    path = plan.out / UNFINISHED_FILE
    if path.exists():
        try:
            begun = json.loads(path.read_text(encoding="utf-8"))
            settings, source = begun["settings"], begun["source"]
        except (ValueError, KeyError, TypeError):
            raise ConfigError(f"{path} is damaged; remove {plan.out} and pack anew") from None
        _check_same(plan, settings, source)
    for partial in plan.out.rglob("*.part"):
        partial.unlink()
    write_json(path, {"settings": plan.settings, "source": plan.source})


def _check_same(plan: PackPlan, settings: dict[str, Any], source: str) -> None:
    flags = {"short_side": "--short-side", "form": "--format", "quality": "--quality", "skip_corrupt": "--skip-corrupt"}
    for name, value in plan.settings.items():
        if settings.get(name) != value:
            raise ConfigError(
                f"{plan.out} was packed with {flags.get(name, '--shard-mb')} {_said(name, settings.get(name))}, "
                f"not {_said(name, value)}; give the same flags, name another OUT, or remove it"
            )
    if source != plan.source:
        raise ConfigError(
            f"{plan.out} was packed from other files, or these have changed since; name another OUT, or remove it"
        )


def _said(name: str, value: Any) -> str:
    if name == "shard_bytes" and isinstance(value, int):
        return f"{value >> 20}"
    return {None: "unset", True: "on", False: "off"}.get(value, str(value))


def _write_shards(plan: PackPlan, processes: int, advance: Advance) -> None:
    missing = []
    for task in _all_tasks(plan):
        if ShardRecord.of(task) is None:
            missing.append(task)
        else:
            advance(len(task.items))
    try:
        for _ in run_all(write_shard, missing, processes, advance):
            pass
    finally:
        for task in missing:  # of processes that were ended
            task.path.with_name(task.path.name + ".part").unlink(missing_ok=True)


def _write_index(folder: Path, tasks: Sequence[ShardTask]) -> PackedPart:
    """Gather the shards' rows into the split's index."""
    rows, shards, left_out = [], [], []
    for number, task in enumerate(tasks):
        record = ShardRecord.of(task)
        if record is None:
            raise DataError(f"{task.path} has vanished while it was packed; run the same command again")
        rows += [(number, *row) for row in record.rows]
        shards.append(Shard(task.path.name, len(record.rows), record.size_bytes, record.sha256))
        left_out += record.left_out
    if not rows:
        raise DataError(f"none of the images for {folder} can be decoded, {left_out[0]} among them")
    path = folder / INDEX_FILE
    partial = path.with_name(path.name + ".part")
    with partial.open("wb") as file:
        np.save(file, np.array(rows, ROW))
        file.flush()
        os.fsync(file.fileno())
    digest = hashlib.sha256(partial.read_bytes()).hexdigest()
    os.replace(partial, path)
    return PackedPart(len(rows), digest, tuple(shards), tuple(left_out))


def _all_tasks(plan: PackPlan) -> list[ShardTask]:
    return [task for name in SPLITS for task in plan.tasks[name]]


def _remove_traces(plan: PackPlan) -> None:
    for task in _all_tasks(plan):
        task.record_path.unlink(missing_ok=True)
    (plan.out / UNFINISHED_FILE).unlink(missing_ok=True)
