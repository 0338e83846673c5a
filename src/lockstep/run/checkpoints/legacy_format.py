"""Interpret checkpoint files of older training scripts; `models/saved_weights.py` reads them without running code.

| keys in the file | written by | finished epochs |
|---|---|---|
| net, acc, epoch | pytorch-cifar | epoch + 1 |
| epoch, arch, state_dict, best_prec1 or best_acc1, optimizer | the ImageNet examples of PyTorch and Apex | epoch |
| epoch, arch, state_dict, optimizer, version (2 or more) | timm | epoch + 1 |
| model, optimizer | Horovod's examples | N of the file's name, checkpoint-N.pth.tar |
| model or model_state_dict, optimizer or optimizer_state_dict, epoch | other scripts | epoch + 1, or N as above |
| tensors alone (a state_dict) | anything | 0 |
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lockstep.errors import CheckpointError
from lockstep.models import saved_weights
from lockstep.models.pretrained import fit_tensors
from lockstep.models.saved_weights import few, find_weights

SAVED_EPOCH = re.compile(r"checkpoint-(\d+)\.")

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class OldCheckpoint:
    """The parts of a file that Lockstep can use.

    `epochs`: finished epochs. `top1`: the best accuracy, 0 to 1. None if not in the file.
    """

    path: Path
    weights: Tensors
    epochs: int | None = None
    top1: float | None = None
    arch: str | None = None


def is_old(path: Path) -> bool:
    """Return whether a path is a file that Lockstep did not write; its checkpoints are folders or safetensors."""
    return path.is_file() and path.suffix != ".safetensors"


def read(path: Path) -> OldCheckpoint:
    """Read a file in any of the formats above, on the CPU.

    Raises:
        CheckpointError: The file is damaged, would run code, or has an unknown format.
    """
    content = saved_weights.read(path)
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{path} contains a {type(content).__name__}, not the dictionary that older scripts save")
    key, weights = find_weights(content)
    if not weights or not all(isinstance(value, torch.Tensor) for value in weights.values()):
        raise CheckpointError(
            f"{path}: unknown checkpoint format: it contains {few(content)}, but no weights under "
            f"{', '.join(saved_weights.NESTED)}"
        )
    best = next((content[key] for key in ("best_prec1", "best_acc1", "acc") if key and key in content), None)
    arch = content.get("arch") if key else None
    return OldCheckpoint(
        path=path,
        weights={str(name): tensor for name, tensor in weights.items()},
        epochs=_finished_epochs(path, content, key),
        top1=None if best is None else _number(path, "best accuracy", best) / 100,
        arch=arch if isinstance(arch, str) else None,
    )


def load_weights(old: OldCheckpoint, model: torch.nn.Module, arch: str) -> None:
    """Load a file's weights into a model.

    Raises:
        CheckpointError: Names or shapes differ from the model's; the message has the first few and the file's network.
    """
    refusal = f"{old.path} does not fit --arch {arch} ({_hint(old, arch)}): "
    fit_tensors(model, old.weights, refusal, any_classes=False)


def _hint(old: OldCheckpoint, arch: str) -> str:
    if old.arch == arch:
        return f"for images larger than 64 pixels, use -a torchvision/{arch}"
    return f"it was written for -a {old.arch}" if old.arch else "use -a to name the network it was written for"


def _finished_epochs(path: Path, content: Mapping[str, Any], key: str | None) -> int | None:
    named = SAVED_EPOCH.search(path.name)
    if key == "model" and named:
        return int(named[1])
    if key is None or "epoch" not in content:
        return None
    epoch = _number(path, "epoch", content["epoch"])
    if epoch != int(epoch) or epoch < 0:
        raise CheckpointError(f"{path}: invalid epoch: {epoch:g}")
    version = content.get("version")
    is_timm = isinstance(version, int) and version > 1  # see timm.models.resume_checkpoint
    return int(epoch) + (key != "state_dict" or is_timm)


def _number(path: Path, name: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        problem = "too large" if isinstance(value, int) else f"{value!r:.100} is not a number"
        raise CheckpointError(f"{path}: invalid {name}: {problem}")
    return number
