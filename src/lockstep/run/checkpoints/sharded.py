"""Store tensors that are sharded over the workers (FSDP2's): each worker writes its parts into a file of its own.

Rank 0 completes the checkpoint once all have written, with `shards.json`, an index of the parts. A worker that resumes
reads only the parts that it needs, so the number of workers may change.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import Shard as Split
from torch.distributed.tensor.placement_types import _StridedShard as LaterSplit

from lockstep.errors import CheckpointError, first_line, printable
from lockstep.files.untrusted import parse_json, read_json
from lockstep.run.checkpoints.snapshot import TensorShard
from lockstep.world.peer_loss import allow_exit
from lockstep.world.world import PEERS_SECONDS, World

INDEX_FILE = "shards.json"
POLL_SECONDS = 0.05
CLOSING_SECONDS = 60.0  # for the parts of workers that may have failed
MAX_DIMENSIONS = 64  # of a tensor in torch
Place = tuple[int, ...]


def file_of(rank: int) -> str:
    return f"shard-{rank:05d}.safetensors"


def is_shard_file(name: str) -> bool:
    return re.fullmatch(r"shard-\d{5}\.safetensors", name) is not None


def place_of(tensor: DTensor) -> tuple[Place, Place, bool] | None:
    """Return where this worker's part of a tensor starts, its sizes, and whether this worker stores it.

    Of replicas, the first worker's are stored. None if the parts are not contiguous, or sums.
    """
    if not tensor.numel() or not all(type(each) in (Split, Replicate, LaterSplit) for each in tensor.placements):
        return None
    mesh, start, sizes = tensor.device_mesh, [0] * tensor.ndim, list(tensor.shape)
    coordinate = mesh.get_coordinate()
    if coordinate is None:  # this worker is not in the mesh
        return tuple(start), tuple(sizes), False
    stores = True
    later = [each for each in range(mesh.ndim) if type(tensor.placements[each]) is LaterSplit]
    # FSDP with tensor parallelism splits the parts of later dimensions of the mesh.
    for dimension in (*(each for each in range(mesh.ndim) if each not in later), *reversed(later)):
        placement, index = tensor.placements[dimension], coordinate[dimension]
        if isinstance(placement, Split | LaterSplit):
            along = placement.dim % tensor.ndim
            each = -(-sizes[along] // mesh.size(dimension))
            first = min(index * each, sizes[along])
            start[along] += first
            sizes[along] = min(each, sizes[along] - first)
        else:
            stores = stores and index == 0
    return tuple(start), tuple(sizes), stores and 0 not in sizes


def shard_of(tensor: DTensor) -> TensorShard | None:
    """Return this worker's part of a tensor, to store; None if it must be stored whole. Equal on all workers."""
    place = place_of(tensor)
    if place is None:
        return None
    start, _, stores = place
    local = tensor.to_local().detach()
    return TensorShard(local if stores else local.new_empty(0), tuple(tensor.shape), start, stores)


def restored_as(parameter: DTensor, stored: StoredTensor) -> torch.Tensor | None:
    """Return a stored tensor, sharded as a parameter of its shape is, of which this worker's part is read."""
    if (place := place_of(parameter)) is None:
        return None
    start, sizes, _ = place
    local = stored.read(start, sizes).to(parameter.device)
    mesh, shape, stride = parameter.device_mesh, parameter.shape, parameter.stride()
    return DTensor.from_local(local, mesh, parameter.placements, run_check=False, shape=shape, stride=stride)


def describe_parts(shards: Mapping[str, TensorShard]) -> dict[str, str]:
    """Return the metadata of a worker's file: the shapes of the whole tensors, and where its parts start."""
    return {"parts": json.dumps({name: [each.shape, each.start] for name, each in shards.items()})}


def write_index(folder: Path, files: Sequence[str]) -> None:
    """Write the index of the parts in the workers' files.

    Raises:
        OSError: A file cannot be read, or the parts are not the whole tensors.
    """
    index: dict[str, Any] = {}
    for name in files:
        try:
            with safe_open(folder / name, "pt") as file:
                parts = parse_json((file.metadata() or {}).get("parts", ""))
                for key, (shape, start) in parts.items():
                    place = [start, file.get_slice(key).get_shape()]
                    known = index.setdefault(key, {"shape": shape, "parts": []})["parts"]
                    if not any(each[1:] == place for each in known):  # a replica in another mesh
                        known.append([name, *place])
        except SafetensorError as error:
            raise OSError(f"{name} cannot be read: {first_line(error)}") from None
    for key, each in index.items():
        if sum(math.prod(sizes) for *_, sizes in each["parts"]) != math.prod(each["shape"]):
            raise OSError(f"the workers' parts of {key} are not the whole tensor")
    (folder / INDEX_FILE).write_text(json.dumps(index), encoding="utf-8")


@dataclass(frozen=True)
class StoredPart:
    """A part of a stored tensor."""

    file: str
    start: Place
    sizes: Place


@dataclass(frozen=True)
class StoredTensor:
    """A sharded tensor in a checkpoint, whose parts are read when they are needed."""

    name: str
    shape: Place
    parts: tuple[StoredPart, ...]
    folder: Path
    opened: dict[str, Any] = field(repr=False)  # the files, shared by the tensors of a checkpoint

    def whole(self) -> torch.Tensor:
        return self.read((0,) * len(self.shape), self.shape)

    def read(self, start: Place, sizes: Place) -> torch.Tensor:
        """Return the elements from `start` on, on the CPU.

        Raises:
            CheckpointError: The files do not have them.
        """
        first = self._read(self.parts[0], [slice(0, 1)] * len(self.shape))
        found, count = torch.zeros(sizes, dtype=first.dtype), 0
        for part in self.parts:
            lows = [max(mine, wanted) for mine, wanted in zip(part.start, start, strict=True)]
            ends = zip(part.start, part.sizes, start, sizes, strict=True)
            highs = [min(mine + size, wanted + length) for mine, size, wanted, length in ends]
            if any(low >= high for low, high in zip(lows, highs, strict=True)):
                continue
            read = self._read(part, _slices(lows, highs, part.start))
            found[tuple(_slices(lows, highs, start))] = read
            count += read.numel()
        if count != math.prod(sizes):
            raise CheckpointError(f"{self.folder / INDEX_FILE} is damaged: it lacks parts of {self.name}")
        return found

    def _read(self, part: StoredPart, slices: list[slice]) -> torch.Tensor:
        path = self.folder / part.file
        try:
            if part.file not in self.opened:
                self.opened[part.file] = safe_open(path, "pt")
            file = self.opened[part.file]
            if tuple(file.get_slice(self.name).get_shape()) != part.sizes:
                raise CheckpointError(f"{path} is damaged: {self.name} has another shape than in {INDEX_FILE}")
            read: torch.Tensor = file.get_slice(self.name)[tuple(slices)] if slices else file.get_tensor(self.name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} cannot be read: {first_line(error)}") from None
        return read


def _slices(lows: Sequence[int], highs: Sequence[int], start: Place) -> list[slice]:
    return [slice(low - at, high - at) for low, high, at in zip(lows, highs, start, strict=True)]


def read_index(folder: Path, files: Mapping[str, Any]) -> dict[str, StoredTensor]:
    """Return the sharded tensors of a checkpoint by name; `files` are those of its manifest, with their sizes."""
    path, opened = folder / INDEX_FILE, dict[str, Any]()
    try:
        index = read_json(path)
        found = {
            name: StoredTensor(name, _place(each["shape"]), tuple(map(_part, each["parts"])), folder, opened)
            for name, each in index.items()
        }
        for each in found.values():
            inside = all(part.file in files and _is_inside(part, each.shape) for part in each.parts)
            distinct = 0 < len(each.parts) == len({part.start for part in each.parts})
            whole = sum(math.prod(part.sizes) for part in each.parts) == math.prod(each.shape)
            if not (inside and distinct and whole):
                raise ValueError(f"the parts of {printable(each.name)} are not the whole tensor")
        if sum(math.prod(each.shape) for each in found.values()) > sum(each["bytes"] for each in files.values()):
            raise ValueError("its tensors are larger than the files")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged: {first_line(error)}") from None
    return found


def _place(values: Any) -> Place:
    if not (isinstance(values, list) and len(values) <= MAX_DIMENSIONS):
        raise TypeError("expected a list of sizes")
    if not all(type(each) is int and 0 <= each < 1 << 63 for each in values):
        raise ValueError("invalid size")
    return tuple(values)


def _part(values: Any) -> StoredPart:
    file, start, sizes = values
    if not (isinstance(file, str) and is_shard_file(file)):
        raise ValueError("invalid name of a file")
    return StoredPart(file, _place(start), _place(sizes))


def _is_inside(part: StoredPart, shape: Place) -> bool:
    if not len(part.start) == len(part.sizes) == len(shape) or 0 in part.sizes:
        return False
    ends = zip(part.start, part.sizes, shape, strict=True)
    return all(start + size <= length for start, size, length in ends)


class WriteBarrier:
    """Lets rank 0 wait, on the thread that writes, until the other workers have written their files.

    Args:
        token: In the names of the partial folders of this job; equal on all workers.
    """

    def __init__(self, world: World, token: str):
        self.rank, self.token = world.rank, token
        self._store, self._others = world.store(), range(1, world.size)
        self._deadline = math.inf
        self._last = 0  # save whose answers were waited for

    def post(self, save: int, description: Mapping[str, Any] | None, problem: str) -> None:
        """Report the file of this worker in a save: its size and SHA-256, or why it was not written."""
        self._store.set(self._key(save, self.rank), json.dumps([description, problem]))

    def wait(self, save: int, folder: Path) -> dict[str, Any]:
        """Return size and SHA-256 of the others' files by name.

        Raises:
            OSError: A file was not written, or is not in the folder.
        """
        found = {}
        for rank, (description, problem) in zip(self._others, self._answers(save), strict=True):
            path = folder / file_of(rank)
            if problem:
                raise OSError(f"worker {rank}: {problem}")
            if _size_of(path) != description["bytes"]:
                raise OSError(f"{path}, written by worker {rank}, is missing: all workers must see the run folder")
            found[path.name] = description
        return found

    def settle(self, save: int) -> None:
        """Wait until no other worker writes any more in a save that failed."""
        if self._last < save:
            with suppress(OSError):
                self._answers(save)

    def _answers(self, save: int) -> list[Any]:
        keys = [self._key(save, rank) for rank in self._others]
        end = time.monotonic() + PEERS_SECONDS
        self._last = save
        try:
            with allow_exit():  # a failed worker never answers
                while not self._store.check(keys):
                    if getattr(sys, "last_value", None) is not None:  # the program has failed, and joins its threads
                        self.hurry()
                    if time.monotonic() > min(end, self._deadline):
                        raise OSError("the other workers have not written their parts in time")
                    time.sleep(POLL_SECONDS)
            answers = [parse_json(self._store.get(key)) for key in keys]
            for key in keys:
                self._store.delete_key(key)
        except RuntimeError:  # the store is closed
            raise OSError("the other workers have ended") from None
        return answers

    def take_time(self) -> None:
        """Wait as long as for a collective operation."""
        self._deadline = math.inf

    def hurry(self) -> None:
        """Wait only shortly from now on, since the run ends, or failed."""
        self._deadline = min(self._deadline, time.monotonic() + CLOSING_SECONDS)

    def _key(self, save: int, rank: int) -> str:
        return f"checkpoint/{self.token}/{save}/{rank}"


def _size_of(path: Path) -> int:
    try:
        with path.open("rb") as file:  # opened, because network file systems may have an old size
            return os.fstat(file.fileno()).st_size
    except OSError:
        return -1
