"""Reading CIFAR's files, which are Python pickles, without letting them run anything.

A pickle may name any function to call. This reader knows the few that NumPy arrays are rebuilt with and refuses all
others, as https://docs.python.org/3/library/pickle.html#restricting-globals describes. Nor are NumPy's own called:
they take any amount of memory, and read beyond the file's bytes for arrays of objects.
"""

from __future__ import annotations

import codecs
import math
import pickle
from io import BytesIO
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from lockstep.errors import DataError, first_line
from lockstep.files.untrusted import read_bytes

MOST_BYTES = 1 << 30  # CIFAR-100's training images take 155 million


_NDARRAY = object()  # stands for numpy.ndarray, which a pickle could call with any shape
_BYTES = np.dtype(np.uint8)  # all that CIFAR's files have


def _rebuild(kind: Any, shape: Any, code: Any) -> Any:
    """The empty array that a pickled one is filled into; of any other shape it could take all memory."""
    if kind is not _NDARRAY or shape != (0,):
        raise ValueError("an array begins with another shape")
    return np.ndarray((0,), np.int8)


def _dtype(code: Any, *_: Any) -> np.dtype[np.uint8]:
    if code != "u1":
        raise ValueError(f"an array is of type {str(code)[:40]!r}, not of bytes")
    return _BYTES


def _fill(unpickler: Any) -> None:
    """Give what was rebuilt its content: an array its shape and bytes; the type of bytes has nothing to be told."""
    state = unpickler.stack.pop()
    target = unpickler.stack[-1]
    if target is _BYTES:
        return
    if type(target) is not np.ndarray:
        raise ValueError("something that is no array is filled")
    version, shape, kind, by_columns, content = state
    if kind is not _BYTES or not all(type(length) is int and length >= 0 for length in shape):
        raise ValueError("an array has a malformed shape or type")
    if not isinstance(content, (bytes, str)) or math.prod(shape) != len(content):
        raise ValueError("an array has another size than its content")
    array: Any = target
    array.__setstate__((version, shape, kind, by_columns, content))


def _refuse(unpickler: Any) -> None:
    raise ValueError("it holds a bytearray, for which memory would be taken before its length is checked")


def _encode(text: Any, encoding: Any) -> bytes:
    if encoding != "latin1":
        raise ValueError(f"bytes are encoded by {str(encoding)[:40]!r}")
    return codecs.encode(text, "latin1")


# NumPy renamed its core module in version 2; files written before keep the old names.
_ALLOWED = {
    ("numpy.core.multiarray", "_reconstruct"): _rebuild,
    ("numpy._core.multiarray", "_reconstruct"): _rebuild,
    ("numpy", "ndarray"): _NDARRAY,
    ("numpy", "dtype"): _dtype,
    ("_codecs", "encode"): _encode,
}


class _ArrayUnpickler(pickle._Unpickler):  # the one in C takes gigabytes for a large number in its memo
    dispatch: ClassVar = {**pickle._Unpickler.dispatch, pickle.BUILD[0]: _fill, pickle.BYTEARRAY8[0]: _refuse}

    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise DataError(f"it names {module}.{name}, which no CIFAR file does; it may be an attack") from None


class _Pickle(BytesIO):
    """A file that ends within a line is cut off; a name in it is not what is left of the line."""

    def readline(self, size: int | None = -1, /) -> bytes:
        line = super().readline(size)
        if not line.endswith(b"\n"):
            raise EOFError("it ends within a line")
        return line


def read_arrays(path: Path) -> dict[str, Any]:
    """Read a pickled dictionary of NumPy arrays, lists, numbers and strings.

    Raises:
        DataError: The file is missing, damaged, or asks for anything else to be run.
    """
    try:
        content = _ArrayUnpickler(_Pickle(read_bytes(path, MOST_BYTES)), encoding="latin1").load()
    except DataError as error:
        raise DataError(f"{path} is refused: {error}") from None
    except Exception as error:  # a damaged pickle can raise nearly anything
        raise DataError(f"{path} cannot be read ({first_line(error)}); delete it and fetch it again") from None
    if not isinstance(content, dict):
        raise DataError(f"{path} holds a {type(content).__name__}, not a dictionary of arrays")
    return content
