"""Reads files of weights (safetensors or torch.save) as tensors and plain containers, without running code in them.

It uses `torch.load(weights_only=True)`, which allows the constructors of tensors and rejects all others. What scripts
save next to weights is allowed too: NumPy scalars, and objects of any class, which become placeholders. Names may
contain `module.` from DataParallel and DistributedDataParallel, or `_orig_mod.` from torch.compile.
"""

from __future__ import annotations

import builtins
import pickle
import re
import struct
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from lockstep.errors import CheckpointError, first_line
from lockstep.files.untrusted import MAX_BYTES, open_plain

WRAPPERS = {"module", "_orig_mod"}
# The keys under which training scripts save weights.
NESTED = ("net", "state_dict", "model_state_dict", "model")
SEARCHED = 4096  # characters
MAX_TENSORS = 1 << 17  # in a safetensors file; the optimizers of the largest networks have a few thousand
MAX_CLASSES = 32  # unknown ones in a file of torch.save; each costs another attempt to load it
_UNKNOWN = re.compile(r"Unsupported global: GLOBAL (\S+) was not an allowed global")
_FILLED = re.compile(r"Can only (SETITEM|append|extend)[^<]*<class '([\w.]+)'>")


def read(path: Path) -> Any:
    """Load a file written by torch.save to the CPU.

    Raises:
        CheckpointError: The file is damaged, calls functions, or has an object in place of weights; the message starts
            with the path.
    """
    content = _load(path)
    candidates = [content.get(key) for key in NESTED] if isinstance(content, Mapping) else [content]
    kinds = [type(each) for each in candidates if isinstance(each, Placeholder)]
    if kinds and not any(isinstance(each, Mapping) for each in candidates):
        raise CheckpointError(
            f"{path}: contains a {kinds[0].__module__}.{kinds[0].__name__} instead of weights; load it with the script "
            f"that saved it, and save its state_dict() instead"
        )
    return content


def _load(path: Path) -> Any:
    try:
        # Torch warns only about pickles that it then rejects.
        with warnings.catch_warnings(action="ignore"), _short_search():
            return _load_inert(path)
    except Exception as error:  # a damaged pickle can raise nearly anything
        wanted = re.search(r"(?:GLOBAL|unrecognized function|but got) ([^\s,]+)", str(error))
        if wanted and "nsupported" in str(error):
            raise CheckpointError(
                f"{path}: not loaded, and no code in it was run: it references {wanted[1][:100].rstrip('.')}, which "
                f"weights do not need. It may be malicious; if you trust it, load it with its own script and save its "
                f"state_dict() alone"
            ) from None
        raise CheckpointError(f"{path} cannot be read as a torch.save checkpoint: {_reason(error)}") from None


def _load_inert(path: Path) -> Any:
    """Call torch.load, which stops at the first unknown class, until there is a placeholder for each.

    Raises:
        pickle.UnpicklingError: The file refers to a builtin function, to a module that torch blocks (os, sys), or to
            more than MAX_CLASSES unknown classes.
    """
    mapped = zipfile.is_zipfile(path)  # torch 1.6 and later; such files can be memory-mapped
    bases: dict[str, type[Placeholder]] = {}
    while True:
        classes = [(_named(name, base), name) for name, base in bases.items()]
        try:
            with torch.serialization.safe_globals([*_SAFE, *classes]):
                return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
        except pickle.UnpicklingError as error:
            name, base = _missing(str(error))
            if not name or bases.get(name) is base or len(bases) == MAX_CLASSES:
                raise
            bases[name] = base


def _named(name: str, base: type[Placeholder]) -> type[Placeholder]:
    module, _, short = name.rpartition(".")
    return type(short, (base,), {"__module__": module})


def _missing(error: str) -> tuple[str, type[Placeholder]]:
    """Return the name of the class that torch's error is about, or "", and the base that its placeholder needs."""
    if filled := _FILLED.search(error):
        return filled[2], _Dict if filled[1] == "SETITEM" else _List
    unknown = _UNKNOWN.search(error)
    name = unknown[1] if unknown else ""
    if isinstance(getattr(builtins, name, None), type):
        return f"builtins.{name}", Placeholder  # torch omits the module
    is_class = "." in name and all(part.isidentifier() for part in name.split("."))
    return name if is_class else "", Placeholder


def read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    """Load the tensors of a safetensors file to the CPU.

    Raises:
        CheckpointError: The file is missing, damaged, of another type, or a pipe or device.
    """
    try:
        _check_header(path)
        return {name: tensor.clone() for name, tensor in load_file(path).items()}  # else unaligned views of the file
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
        header = file.read(min(length, MAX_BYTES + 1))
    if len(header) > MAX_BYTES or header.count(b"{") > MAX_TENSORS:
        raise ValueError(f"its header has more than {MAX_BYTES:,} bytes or {MAX_TENSORS:,} tensors")


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


class Placeholder:
    """Replaces an object of an unknown class, whose name a subclass has. Drops the object's content."""

    def __init__(self, *_: object):
        pass

    def __setstate__(self, _: object) -> None:
        pass


class _Dict(Placeholder):
    """Replaces subclasses of dict by OrderedDict, which torch's unpickler can fill and give attributes."""

    def __new__(cls, *_: object) -> OrderedDict[Any, Any]:  # type: ignore[misc]
        return OrderedDict()


class _List(Placeholder):
    """Replaces subclasses of list."""

    def __new__(cls, *_: object) -> list[Any]:  # type: ignore[misc]
        return []


def _class_in(owner: object, _: str) -> object:
    """Replace getattr, by which protocol 2 refers to a class in a class.

    Raises:
        pickle.UnpicklingError: `owner` is not a placeholder.
    """
    if not (isinstance(owner, type) and issubclass(owner, Placeholder)):
        raise pickle.UnpicklingError("Unsupported GLOBAL getattr")
    return owner


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


# What torch.load may call. NumPy 2 renamed its core module; older files have the old name.
_SAFE: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = [
    (_class_in, "builtins.getattr"),
    (_Format, "numpy.dtype"),
    (_rebuild_number, "numpy.core.multiarray.scalar"),
    (_rebuild_number, "numpy._core.multiarray.scalar"),
]
