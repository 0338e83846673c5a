"""What the pipelines take of memory, over many epochs and where there is too little."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from commands import run

from lockstep.config.schema import AugmentConfig, DataConfig
from lockstep.data.loaders import TrainLoader, reader_for
from lockstep.data.readers import Placement
from lockstep.data.sets import InputSpec, UserSplit
from lockstep.data.sharding import Sharding
from lockstep.data.sources import image_folder

CPU = torch.device("cpu")
FOLDERS = [str(Path(__file__).parent), str(Path(__file__).parents[2] / "support")]
IMPORT = f"import sys; sys.path[:0] = {FOLDERS}; import test_memory as t"
SPEC = InputSpec(3, 224, 224, (0.5,) * 3, (0.25,) * 3)


def _family_bytes() -> int:
    """Memory of this process and its children; what they share counts for each."""
    me = psutil.Process()
    return sum(process.memory_info().rss for process in [me, *me.children(recursive=True)])


PIPELINES = (("never", 0), ("never", 2), ("always", 0))


def _growth(in_memory: str, processes: int, path: str) -> None:
    """Print how many bytes ten epochs have added."""
    config = DataConfig(dataset=path, in_memory=in_memory, image_size=224)  # type: ignore[arg-type]
    data = image_folder.load(Path(path), config)
    augment = AugmentConfig(flip=True)
    reader = reader_for(data.train, data.input, Placement(CPU), augment, processes=processes)
    loader = TrainLoader(reader, Sharding(len(data.train), 16), CPU)
    sizes = []
    for epoch in range(15):
        for batch in loader.epoch(epoch):
            batch.images.sum()
        sizes.append(_family_bytes())
    reader.close()
    print(sizes[-1] - sizes[4])


def growths(path: str) -> None:
    """Print the growth of each pipeline, in a process of its own that is forked from this one."""
    for in_memory, processes in PIPELINES:
        process = os.fork()
        if process == 0:
            _growth(in_memory, processes, path)
            sys.stdout.flush()
            os._exit(0)
        assert os.waitpid(process, 0)[1] == 0


@pytest.mark.cold
def test_memory_does_not_grow_over_15_epochs(new_folder: Callable[..., Path]) -> None:
    """Each time in a process where nothing else takes memory, and what is free is given back."""
    path = new_folder(sizes=((300, 200), (240, 260)), train=20, val=1)
    command = [sys.executable, "-W", "ignore", "-c", f"{IMPORT}; t.growths({str(path)!r})"]
    settled = os.environ | {"MALLOC_ARENA_MAX": "1", "MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(command, capture_output=True, text=True, env=settled)
    # A batch that every epoch left behind would be 24 MB as bytes; a pipeline may have one batch more at the end.
    grown = dict(zip(PIPELINES, map(int, done.stdout.split()), strict=True))
    assert all(size < 12e6 for size in grown.values()), (grown, done.stderr)


class _Blank:
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.zeros(3, 224, 224), index


def take_an_epoch(kind: str, path: str) -> None:
    split = UserSplit(_Blank()) if kind == "user" else image_folder.load(Path(path), DataConfig(dataset=path)).train
    reader = reader_for(split, SPEC, Placement(CPU), AugmentConfig(), processes=1)
    list(reader.read([np.arange(32)] * 3, 0))


# What follows has 1 MB of shared memory, in a mount namespace of its own.
SMALL = """
import ctypes, subprocess, sys
NEW_MOUNTS = 0x20000
if ctypes.CDLL(None).unshare(NEW_MOUNTS):
    sys.exit(77)
for words in ("--make-rprivate /", "-t tmpfs -o size={size} none /dev/shm"):
    if subprocess.run(["mount", *words.split()]).returncode:
        sys.exit(77)
"""


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="needs a mount namespace of its own")
@pytest.mark.parametrize("kind", ["files", "user"])
def test_full_shared_memory_is_an_error_with_a_fix(kind: str, new_folder: Callable[..., Path], tmp_path: Path) -> None:
    path = new_folder(sizes=((300, 200), (240, 260)), train=32, val=1)
    error = _error_with("1m", kind, path, tmp_path)
    assert "DataError: shared memory is full: a loader process needs" in error
    assert "enlarge /dev/shm" in error


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="needs a mount namespace of its own")
@pytest.mark.parametrize("size", ["4k", "read-only"])
def test_no_room_for_a_semaphore_is_an_error_with_a_fix(tmp_path: Path, size: str) -> None:
    error = _error_with(size, "user", tmp_path, tmp_path)
    assert "DataError: cannot start loader processes: " in error
    assert error.rstrip().endswith("or use none (--workers 0, num_workers=0)")
    assert "Exception ignored" not in error


def _error_with(size: str, kind: str, path: Path, folder: Path) -> str:
    code = f"{SMALL.replace('{size}', '1m' if size == 'read-only' else size)}\n{IMPORT}"
    if size == "read-only":
        code += "\nimport subprocess; subprocess.run('mount -o remount,ro /dev/shm', shell=True, check=True)"
    done = run([sys.executable, "-c", f"{code}\nt.take_an_epoch({kind!r}, {str(path)!r})"], folder)
    if done.returncode == 77:
        pytest.skip("may not mount")
    assert done.returncode == 1, done.stderr
    return done.stderr
