"""Reads files of weights (safetensors or torch.save) as tensors and plain containers, without running code in them.

It uses `torch.load(weights_only=True)`, which allows the constructors of tensors and rejects all others; NumPy scalars,
which scripts save next to weights, are allowed too. Names may contain `module.` from DataParallel and
DistributedDataParallel, or `_orig_mod.` from torch.compile.
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
# The keys under which training scripts save weights.
NESTED = ("net", "state_dict", "model_state_dict", "model")
SEARCHED = 4096  # characters
MOST_TENSORS = 1 << 17  # in a safetensors file; the optimizers of the largest networks have a few thousand


def read(path: Path) -> Any:
    """Load a file written by torch.save to the CPU.

    Raises:
        CheckpointError: The file is damaged, or contains anything but data; the message starts with the path.
    """
    try:
        mapped = zipfile.is_zipfile(path)  # torch 1.6 and later; such files can be memory-mapped
        # Torch warns only about pickles that it then rejects.
        with torch.serialization.safe_globals(_NUMBERS), warnings.catch_warnings(action="ignore"), _short_search():
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:  # a damaged pickle can raise nearly anything
        wanted = re.search(r"(?:GLOBAL|unrecognized function|but got) ([^\s,]+)", str(error))
        if wanted and "nsupported" in str(error):
            raise CheckpointError(
                f"{path}: not loaded, and no code in it was run: it references {wanted[1][:100].rstrip('.')}, but a "
                f"checkpoint may only contain tensors, numbers and text. It may be malicious; if you saved a whole "
                f"model, save its state_dict() instead"
            ) from None
        raise CheckpointError(f"{path} cannot be read as a torch.save checkpoint: {_reason(error)}") from None


def read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    """Load the tensors of a safetensors file to the CPU.

    Raises:
        CheckpointError: The file is missing, damaged, of another type, or a pipe or device.
    """
    try:
        _check_header(path)
        return load_file(path)
    except SafetensorError as error:
        reason = f"it is damaged, or not a safetensors file ({first_line(error)})"
    except OSError as error:
        reason = error.strerror or first_line(error)
    except (ValueError, KeyError) as error:
        reason = first_line(error)
    raise CheckpointError(f"{path} cannot be read as safetensors: {reason}")


def _check_header(path: Path) -> None:
    """Reject a header that would take minutes to parse. It consists of its length and JSON with an entry per tensor.

    Raises:
        OSError: The file cannot be read.
        ValueError: The header is too large, or the file is a pipe or device.
    """
    with open_plain(path) as file:
        length = int.from_bytes(file.read(8), "little")
        header = file.read(min(length, MOST_BYTES + 1))
    if len(header) > MOST_BYTES or header.count(b"{") > MOST_TENSORS:
        raise ValueError(f"its header has more than {MOST_BYTES:,} bytes or {MOST_TENSORS:,} tensors")


def _reason(error: Exception) -> str:
    """Return why torch.load failed, without torch's message, which recommends weights_only=False."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if "TorchScript" in str(error):
        return "it is a TorchScript archive; save its state_dict() with torch.save instead"
    if isinstance(error, MemoryError) or "allocate memory" in str(error):
        return "not enough memory, or the file is damaged"
    return "it is damaged, or not a torch.save file"


def find_weights(content: Mapping[str, Any]) -> tuple[str | None, Mapping[str, Any]]:
    """Return the key of the weights in a file's content, or None if they are at the top level, and the weights."""
    key = next((key for key in NESTED if isinstance(content.get(key), Mapping)), None)
    return (None, content) if key is None else (key, content[key])


def match_names(names: Iterable[str], model: nn.Module) -> dict[str, str]:
    """Map the names in a file to the model's, ignoring wrappers; names that the model lacks map to unknown names.

    A network may have a submodule called `module`, so several ways of removing wrapper names are tried; the one that
    matches the most names of the model is used.
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
    """Return a weight's or module's name without the wrappers' parts."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def few(items: Iterable[Any], most: int = 3) -> str:
    """Return the first items as text, and how many more there are."""
    texts = [str(item) for item in items]
    more = f" and {len(texts) - most} more" if len(texts) > most else ""
    return (", ".join(texts[:most]) or "nothing") + more


class _ShortSearch:
    """The module `re`, with a `search` that only scans the first SEARCHED characters."""

    def __getattr__(self, name: str) -> Any:
        return getattr(re, name)

    def search(self, pattern: str, text: str) -> re.Match[str] | None:
        return re.search(pattern, text[:SEARCHED])


@contextmanager
def _short_search() -> Iterator[None]:
    """Limit torch's searches in its error message, which a malicious file can make several megabytes long.

    The time of one of torch's patterns is quadratic in the length.
    """
    torch.serialization.re = _ShortSearch()  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.serialization.re = re


class _Format:
    """Replaces numpy.dtype when unpickling, so that NumPy is not used to read files."""

    def __init__(self, code: str, *_: object):
        self.code, self.order = code, "<"

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.order = "<" if state[1] in "|=" else state[1]


def _rebuild_number(kind: _Format, raw: bytes | str) -> float:
    """Decode a NumPy scalar, such as the accuracy in pytorch-cifar's checkpoints."""
    letters = {"f2": "e", "f4": "f", "f8": "d", "i4": "i", "i8": "q", "u4": "I", "u8": "Q", "b1": "?"}
    return float(
        struct.unpack(kind.order + letters[kind.code], raw.encode("latin1") if isinstance(raw, str) else raw)[0]
    )


# NumPy 2 renamed its core module; older files have the old name.
_NUMBERS: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = [
    (_Format, "numpy.dtype"),
    (_rebuild_number, "numpy.core.multiarray.scalar"),
    (_rebuild_number, "numpy._core.multiarray.scalar"),
]
