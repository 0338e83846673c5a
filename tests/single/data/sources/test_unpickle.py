"""Reading CIFAR's pickles without running what they ask for."""

from __future__ import annotations

import os
import pickle
import resource
import struct
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from lockstep.data.sources.unpickle import read_arrays
from lockstep.errors import DataError

# {"data": array([[0, 127, 255]], uint8), "labels": [4, 5]} as Python 2 and NumPy 1 wrote it: byte strings, old names.
PYTHON_2 = (
    b"\x80\x02}(U\x04datacnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
    b"(K\x01K\x01K\x03\x86cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    b"\x89U\x03\x00\x7f\xfftbU\x06labels](K\x04K\x05eu."
)


class Call:
    """Pickles as a call of `function(*arguments)`, which plain unpickling makes."""

    def __init__(self, function: Any, *arguments: Any):
        self._call = (function, arguments)

    def __reduce__(self) -> Any:
        return self._call


def test_reads_what_python_2_wrote(tmp_path: Path) -> None:
    (tmp_path / "batch").write_bytes(PYTHON_2)
    content = read_arrays(tmp_path / "batch")
    assert content["data"].dtype == np.uint8
    assert content["data"].tolist() == [[0, 127, 255]]
    assert content["labels"] == [4, 5]


@pytest.mark.parametrize("protocol", range(5))
def test_reads_what_this_python_writes(tmp_path: Path, protocol: int) -> None:
    content = {"data": np.arange(256, dtype=np.uint8).reshape(2, 128), "labels": [0, 9], "names": ["cat", "dög"]}
    (tmp_path / "batch").write_bytes(pickle.dumps(content, protocol))
    read = read_arrays(tmp_path / "batch")
    assert read["data"].tolist() == content["data"].tolist()
    assert (read["labels"], read["names"]) == (content["labels"], content["names"])


@pytest.mark.parametrize("protocol", [0, 2, 4])
@pytest.mark.parametrize("nested", [False, True])
def test_a_hostile_pickle_is_refused_by_name_and_nothing_runs(tmp_path: Path, protocol: int, nested: bool) -> None:
    marker = tmp_path / "executed"
    attack: Any = Call(os.system, f"touch {marker}")
    content = {"data": np.zeros(3, np.uint8), "labels": [attack]} if nested else attack
    path = tmp_path / "data_batch_1"
    path.write_bytes(pickle.dumps(content, protocol))
    with pytest.raises(DataError, match=rf"{path} is refused.*system"):
        read_arrays(path)
    assert not marker.exists()
    pickle.loads(path.read_bytes())
    assert marker.exists()  # it was an attack


@pytest.mark.parametrize(
    "call",
    [
        Call(eval, "1"),
        Call(np.load, "x.npy", None, True),
        Call(np.fromfile, "/etc/hostname"),
        Call(getattr, "text", "upper"),
        Call(__import__, "os"),
    ],
    ids=["eval", "numpy.load", "numpy.fromfile", "getattr", "import"],
)
def test_nothing_but_the_rebuilding_of_arrays_is_known(tmp_path: Path, call: Call) -> None:
    path = tmp_path / "batch"
    path.write_bytes(pickle.dumps({"data": call}))
    with pytest.raises(DataError, match="is refused"):
        read_arrays(path)


@pytest.mark.parametrize(
    "content",
    [b"", PYTHON_2[:60], PYTHON_2[:-1], b"no pickle at all", b"\x80\x02" + struct.pack("<cI", b"T", 2**31 - 1)],
    ids=["empty", "cut in an array", "without its end", "text", "a string longer than the file"],
)
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "batch"
    path.write_bytes(content)
    with pytest.raises(DataError, match=f"{path} cannot be read"):
        read_arrays(path)


def test_a_missing_file_and_another_kind_of_content_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="missing"):
        read_arrays(tmp_path / "missing")
    (tmp_path / "list").write_bytes(pickle.dumps([1, 2]))
    with pytest.raises(DataError, match="list, not a dictionary"):
        read_arrays(tmp_path / "list")


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x02}r\xff\xff\xff\x7fX\x01\x00\x00\x00a" + b"j\x01\x00\x00\x00s.",
        pickle.dumps({"data": np.zeros(0)}, 2).replace(b"K\x00\x85", b"J\xff\xff\xff\x3f\x85", 1),
        b"\x80\x04\x8e" + (1 << 34).to_bytes(8, "little") + b"x.",
        b"\x80\x05\x96" + (1 << 34).to_bytes(8, "little") + b"x.",
        b"\x80\x02cnumpy\nndarray\nJ\x00\x2d\x31\x01\x85U\x01O\x86R.",
        b"\x80\x02cnumpy\nndarray\nJ\x00\x2d\x31\x01\x85U\x01O\x86\x81.",
        *(
            PYTHON_2.replace(b"K\x01K\x01K\x03\x86", b"K\x01J\xff\xff\xff\x7fK\x03\x86", 1).replace(b"u1", code)
            for code in (b"u1", b"O8")
        ),
    ],
    ids=[
        *("a large number in the memo", "a large array", "a long text", "a long bytearray", "an array called for"),
        *("an array made", "an array larger than its content", "an array of objects"),
    ],
)
def test_a_small_file_takes_little_memory(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "batch").write_bytes(data)
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    used = psutil.Process().memory_info().data
    resource.setrlimit(resource.RLIMIT_DATA, (used + (256 << 20), hard))
    try:
        with pytest.raises(DataError, match=r"cannot be read \((?!MemoryError)"):
            read_arrays(tmp_path / "batch")
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
