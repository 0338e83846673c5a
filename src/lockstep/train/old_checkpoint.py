"""Checkpoint files of older training scripts, read as tensors and plain containers; nothing in them is run.

| what the file holds | written by | finished epochs |
|---|---|---|
| net, acc, epoch | pytorch-cifar | epoch + 1 |
| epoch, arch, state_dict, best_prec1 or best_acc1, optimizer | the ImageNet examples of PyTorch and Apex | epoch |
| model, optimizer | Horovod's examples | N of the file's name, checkpoint-N.pth.tar |
| model, optimizer, epoch | others | epoch + 1, unless the name says it |
| tensors alone (a state_dict) | anything | 0 |

Names may have `module.` of DataParallel and DistributedDataParallel or `_orig_mod.` of torch.compile in them. Reading
is `torch.load(weights_only=True)`, which knows the constructors of tensors and refuses all others by name.
"""

from __future__ import annotations

import math
import re
import struct
import zipfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lockstep.errors import CheckpointError, first_line

WRAPPERS = {"module", "_orig_mod"}
SAVED_EPOCH = re.compile(r"checkpoint-(\d+)\.")

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class OldCheckpoint:
    """What a file holds that Lockstep can use.

    `epochs` are finished; `top1` is the best so far, a share; None where the file does not say.
    """

    path: Path
    weights: Tensors
    optimizer: Mapping[str, Any] | None = None
    epochs: int | None = None
    top1: float | None = None
    arch: str | None = None


def is_old(path: Path) -> bool:
    """Whether a path can only be an older script's checkpoint: a file, where Lockstep's are folders and safetensors."""
    return path.is_file() and path.suffix != ".safetensors"


def read(path: Path) -> OldCheckpoint:
    """Read a file in any of the forms above, on the CPU.

    Raises:
        CheckpointError: The file is damaged, wants something run, or has none of the forms.
    """
    content = _load(path)
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, not the dictionary that older scripts save")
    key = next((key for key in ("net", "state_dict", "model") if isinstance(content.get(key), Mapping)), None)
    weights = content[key] if key else content
    if not weights or not all(isinstance(value, torch.Tensor) for value in weights.values()):
        raise CheckpointError(
            f"{path} is no checkpoint that Lockstep knows: it holds {_few(content)}, and no weights under net, "
            f"state_dict or model"
        )
    best = next((content[key] for key in ("best_prec1", "best_acc1", "acc") if key and key in content), None)
    optimizer, arch = (content.get("optimizer"), content.get("arch")) if key else (None, None)
    return OldCheckpoint(
        path=path,
        weights={str(name): tensor for name, tensor in weights.items()},
        optimizer=optimizer if isinstance(optimizer, Mapping) else None,
        epochs=_finished_epochs(path, content, key),
        top1=None if best is None else _number(path, "best accuracy", best) / 100,
        arch=arch if isinstance(arch, str) else None,
    )


def load_weights(old: OldCheckpoint, model: torch.nn.Module, arch: str) -> None:
    """Put a file's weights into a model, without the wrappers' parts of their names.

    Raises:
        CheckpointError: Names or shapes are not the model's; the message has the first few and the file's network.
    """
    wanted = model.state_dict()
    weights = old.weights
    if not weights.keys() <= wanted.keys():
        weights = {_unwrapped(name): tensor for name, tensor in weights.items()}
    counters = {name for name in wanted if name.endswith(".num_batches_tracked")}  # not there before torch 0.4.1
    missing = wanted.keys() - weights.keys() - counters
    unknown = weights.keys() - wanted.keys()
    shapes = [
        f"{name} is {list(tensor.shape)}, not {list(wanted[name].shape)}"
        for name, tensor in weights.items()
        if name in wanted and tensor.shape != wanted[name].shape
    ]
    wrong = [f"it has no {_few(sorted(missing))}"] if missing else []
    wrong += [f"the model has no {_few(sorted(unknown))}"] if unknown else []
    wrong += [_few(shapes)] if shapes else []
    if wrong:
        raise CheckpointError(f"{old.path} does not fit --arch {arch}: {'; '.join(wrong)} ({_hint(old, arch)})")
    model.load_state_dict(weights, strict=False)  # but for counters, all is there


def _hint(old: OldCheckpoint, arch: str) -> str:
    if old.arch == arch:
        return f"it names {arch} too, which for images of more than 64 pixels is -a torchvision/{arch}"
    return f"it was written for -a {old.arch}" if old.arch else "choose the network it was written for with -a"


def _load(path: Path) -> Any:
    mapped = zipfile.is_zipfile(path)  # the form of torch 1.6 and later; it need not be read as a whole
    try:
        with torch.serialization.safe_globals(_NUMBERS):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:  # a damaged pickle can raise nearly anything
        wanted = re.search(r"(?:GLOBAL|unrecognized function|but got) ([^\s,]+)", str(error))
        if wanted and "nsupported" in str(error):
            raise CheckpointError(
                f"{path} is refused, and nothing in it was run: it asks for {wanted[1].rstrip('.')}, where checkpoints "
                f"hold tensors, numbers and text. It may be an attack; or a whole model was saved, which its own "
                f"script must save anew as state_dict()"
            ) from None
        raise CheckpointError(
            f"{path} cannot be read as a checkpoint of torch.save: {first_line(error)[:200]}"
        ) from None


class _Format:
    """NumPy's dtype of one number, as files name it; NumPy itself has no part in reading them."""

    def __init__(self, code: str, *_: object):
        self.code, self.order = code, "<"

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.order = "<" if state[1] in "|=" else state[1]


def _rebuild_number(kind: _Format, raw: bytes | str) -> float:
    """One number from the bytes of a NumPy scalar, such as pytorch-cifar's accuracy may be."""
    letters = {"f2": "e", "f4": "f", "f8": "d", "i4": "i", "i8": "q", "u4": "I", "u8": "Q", "b1": "?"}
    return float(
        struct.unpack(kind.order + letters[kind.code], raw.encode("latin1") if isinstance(raw, str) else raw)[0]
    )


# NumPy renamed its core module in version 2; files written before keep the old name.
_NUMBERS: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = [
    (_Format, "numpy.dtype"),
    (_rebuild_number, "numpy.core.multiarray.scalar"),
    (_rebuild_number, "numpy._core.multiarray.scalar"),
]


def _finished_epochs(path: Path, content: Mapping[str, Any], key: str | None) -> int | None:
    named = SAVED_EPOCH.search(path.name)
    if key == "model" and named:
        return int(named[1])
    if key is None or "epoch" not in content:
        return None
    epoch = _number(path, "epoch", content["epoch"])
    if epoch != int(epoch) or epoch < 0:
        raise CheckpointError(f"{path}: its epoch is {epoch:g}")
    return int(epoch) + (key != "state_dict")


def _number(path: Path, name: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError):
        number = math.nan
    if not math.isfinite(number):
        raise CheckpointError(f"{path}: its {name} is {value!r}, not a number")
    return number


def _unwrapped(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def _few(names: Iterable[Any]) -> str:
    texts = [str(name) for name in names]
    more = f" and {len(texts) - 3} more" if len(texts) > 3 else ""
    return (", ".join(texts[:3]) or "nothing") + more
