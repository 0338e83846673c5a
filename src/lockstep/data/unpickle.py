"""Reading CIFAR's files, which are Python pickles, without letting them run anything.

A pickle may name any function to call. This reader knows the few that NumPy arrays are rebuilt with and refuses all
others, as https://docs.python.org/3/library/pickle.html#restricting-globals describes.
"""

from __future__ import annotations

import codecs
import pickle
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.errors import DataError

# NumPy renamed its core module in version 2; files written before keep the old names.
_REBUILD = np.zeros(0).__reduce__()[0]
_ALLOWED = {
    ("numpy.core.multiarray", "_reconstruct"): _REBUILD,
    ("numpy._core.multiarray", "_reconstruct"): _REBUILD,
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("_codecs", "encode"): codecs.encode,
}


class _ArrayUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise DataError(f"it names {module}.{name}, which no CIFAR file does; it may be an attack") from None


def read_arrays(path: Path) -> dict[str, Any]:
    """Read a pickled dictionary of NumPy arrays, lists, numbers and strings.

    Raises:
        DataError: The file is missing, damaged, or asks for anything else to be run.
    """
    try:
        with path.open("rb") as file:
            content = _ArrayUnpickler(file, encoding="latin1").load()
    except DataError as error:
        raise DataError(f"{path} is refused: {error}") from None
    except Exception as error:  # a damaged pickle can raise nearly anything
        raise DataError(f"{path} cannot be read ({error}); delete it and fetch it again") from None
    if not isinstance(content, dict):
        raise DataError(f"{path} holds a {type(content).__name__}, not a dictionary of arrays")
    return content
