"""Commits of a state: in host memory, and if need be in a file for the worker that replaces this one.

The file is in the job's folder for snapshots in memory. A worker that must exit because of its accelerator writes it,
since no other may have the state. All remove it before they train, so it is never older than the last commit.
"""

from __future__ import annotations

import copy
import os
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import cloudpickle
import torch

from lockstep.errors import CheckpointError, first_line
from lockstep.files.atomic import replacing
from lockstep.files.output import say
from lockstep.hvd.basics import is_initialized, rank
from lockstep.hvd.engine import context as engine
from lockstep.models.nested import leaves
from lockstep.world import COMMIT, SNAPSHOTS, accelerator
from lockstep.world.host_memory import PinnedCopies

_copies = cache(PinnedCopies)


class StateCopy:
    """A deep copy of a state, with this device's plain tensors, in nested mappings and sequences, in host memory."""

    def __init__(self, state: Any) -> None:
        found = [leaf for leaf in leaves(state) if type(leaf) is torch.Tensor and leaf.device.type != "cpu"]
        device = accelerator.current() if found else torch.device("cpu")
        plain = (device, torch.strided, False)
        found = [each for each in found if (each.device, each.layout, each.requires_grad) == plain]
        copies = _copies(device, engine.current.rank_info.local_size if engine.current else 1)
        with copies.making() as wait:
            pairs = [(tensor, copies.copy_tensor(tensor)) for tensor in found]
        copies.protect()
        wait()
        self._moved = [(host, torch.empty_like(tensor, device="meta")) for tensor, host in pairs]  # with its strides
        self.value = copy.deepcopy(state, {id(tensor): host for tensor, host in pairs})

    def restored(self) -> Any:
        """Return another deep copy, with the tensors on this worker's device."""
        device = accelerator.current() if self._moved else None
        own = {id(host): torch.empty_like(form, device=device).copy_(host) for host, form in self._moved}
        return copy.deepcopy(self.value, own)


def keep(state: Any, work: str) -> None:
    """Write the last commit of some work, unless a worker of this host has, or a custom class may save more."""
    path, parts = _path(), _parts(state)
    commit = {name: vars(part).get("_saved") for name, part in parts.items()}  # None: the device has failed in `save`
    is_known = all(type(part).save.__module__ == f"{__package__}.state" for part in parts.values())
    if path.exists() or not is_known or None in commit.values():
        return
    try:
        with replacing(path, shared=True) as partial, partial.open("wb") as file:  # torch refuses such a file's name
            torch.save((work, commit), file, pickle_module=cloudpickle)
    except Exception as error:  # of custom objects, or no room
        say(f"lockstep: the last commit cannot be kept in {path}: {first_line(error)}")


def take(state: Any, work: str) -> bool:
    """Restore the commit that a worker on rank 0's host has kept, as all take its state; return False without one."""
    if not _path().exists() or not is_initialized() or rank():
        return False
    kept, commit = torch.load(_path(), weights_only=False)
    if kept != work:
        forget()
        raise CheckpointError(f"the last commit is of {kept}, but the script has started again with {work}")
    for name, part in _parts(state).items():
        part._saved = commit[name]
    state.restore()
    state.on_reset()
    say("lockstep: continuing from the last commit of a worker that was replaced, too")
    return True


def forget() -> None:
    """Remove the file, since newer commits may follow."""
    with suppress(OSError):
        _path().unlink()


def _path() -> Path:
    return Path(os.environ.get(SNAPSHOTS, os.devnull), COMMIT)  # under other launchers, no file


def _parts(state: Any) -> dict[str, Any]:
    return {"": state, **vars(state).get("_handlers", {})}
