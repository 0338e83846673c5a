"""Files of weights, of safetensors or torch.save, read as tensors and plain containers; nothing in them is run.

Reading is `torch.load(weights_only=True)`, which knows the constructors of tensors and refuses all others by name; the
numbers of NumPy that scripts keep beside the weights are let through. Names of weights may have `module.` of
DataParallel and DistributedDataParallel or `_orig_mod.` of torch.compile in them.
"""

from __future__ import annotations

import re
import struct
import warnings
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from lockstep.errors import CheckpointError, first_line
from lockstep.files.untrusted import MOST_BYTES, open_plain

WRAPPERS = {"module", "_orig_mod"}
# Where training scripts keep the weights within what they save.
NESTED = ("net", "state_dict", "model_state_dict", "model")
SEARCHED = 4096  # characters
MOST_TENSORS = 1 << 17  # of a safetensors file; the largest networks' optimizers have some thousands


def read(path: Path) -> Any:
    """What a file holds, on the CPU.

    Raises:
        CheckpointError: The file is damaged, or wants something run; the message begins with the path.
    """
    try:
        mapped = zipfile.is_zipfile(path)  # the form of torch 1.6 and later; it need not be read as a whole
        # Warnings are of a pickle that is refused anyway.
        with torch.serialization.safe_globals(_NUMBERS), warnings.catch_warnings(action="ignore"), _short_search():
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:  # a damaged pickle can raise nearly anything
        wanted = re.search(r"(?:GLOBAL|unrecognized function|but got) ([^\s,]+)", str(error))
        if wanted and "nsupported" in str(error):
            raise CheckpointError(
                f"{path} is refused, and nothing in it was run: it asks for {wanted[1][:100].rstrip('.')}, where "
                f"checkpoints hold tensors, numbers and text. It may be an attack; or a whole model was saved, which "
                f"its own script must save anew as state_dict()"
            ) from None
        raise CheckpointError(f"{path} cannot be read as a checkpoint of torch.save: {_reason(error)}") from None


def read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    """The tensors in a safetensors file, on the CPU.

    Raises:
        CheckpointError: It is missing, damaged, another kind of file, or a pipe or device.
    """
    try:
        _check_header(path)
        return load_file(path)
    except SafetensorError as error:
        reason = f"it is damaged, or another kind of file ({first_line(error)})"
    except OSError as error:
        reason = error.strerror or first_line(error)
    except (ValueError, KeyError) as error:
        reason = first_line(error)
    raise CheckpointError(f"{path} cannot be read as safetensors: {reason}")


def _check_header(path: Path) -> None:
    """Refuse a header that would take minutes to read: its length comes first, then JSON with an entry a tensor.

    Raises:
        OSError: The file cannot be read.
        ValueError: It has too many tensors, or is a pipe or device.
    """
    with open_plain(path) as file:
        length = int.from_bytes(file.read(8), "little")
        header = file.read(min(length, MOST_BYTES + 1))
    if len(header) > MOST_BYTES or header.count(b"{") > MOST_TENSORS:
        raise ValueError(f"its header has more than {MOST_BYTES:,} bytes or {MOST_TENSORS:,} tensors")


def _reason(error: Exception) -> str:
    """Why torch.load failed, without its own text, which advises to load the file with weights_only=False."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if "TorchScript" in str(error):
        return "it is a TorchScript program; save its state_dict() with torch.save instead"
    if isinstance(error, MemoryError) or "allocate memory" in str(error):
        return "it needs more memory than there is, or is damaged"
    return "it is damaged, or another kind of file"


def find_weights(content: Mapping[str, Any]) -> tuple[str | None, Mapping[str, Any]]:
    """The key under which a file's content has its weights, and these; None if the content itself may be weights."""
    key = next((key for key in NESTED if isinstance(content.get(key), Mapping)), None)
    return (None, content) if key is None else (key, content[key])


def match_names(names: Iterable[str], model: nn.Module) -> dict[str, str]:
    """For each name of a file's weights the model's, without the wrappers' parts; names that fit none stay unknown.

    Of the ways to take the wrappers off, the one that finds the most of the model's names is taken: a network may have
    a module of its own that is called `module`.
    """
    names, wanted = list(names), set(model.state_dict())
    by_bare = {bare(name): name for name in wanted}
    ways = [{name: by_bare.get(bare(name), bare(name)) for name in names}, {name: name for name in names}]
    outer = names
    while outer and all(name.split(".")[0] in WRAPPERS for name in outer):
        outer = [name.partition(".")[2] for name in outer]
        ways.append(dict(zip(names, outer, strict=True)))
    return max(ways, key=lambda way: (len(set(way.values())) == len(names), len(wanted & set(way.values()))))


def bare(name: str) -> str:
    """A weight's or module's name without any wrapper's part."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def few(words: Iterable[Any], most: int = 3) -> str:
    """The first of some words, and how many more there are."""
    texts = [str(word) for word in words]
    more = f" and {len(texts) - most} more" if len(texts) > most else ""
    return (", ".join(texts[:most]) or "nothing") + more


class _ShortSearch:
    """Python's `re`, whose `search` looks at the first characters alone."""

    def __getattr__(self, name: str) -> Any:
        return getattr(re, name)

    def search(self, pattern: str, text: str) -> re.Match[str] | None:
        return re.search(pattern, text[:SEARCHED])


@contextmanager
def _short_search() -> Iterator[None]:
    """Keep torch from searching a refusal's whole message, in which a file's name for what it wants may fill megabytes.

    The time of one of its patterns grows with the square of that.
    """
    torch.serialization.re = _ShortSearch()  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.serialization.re = re


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
