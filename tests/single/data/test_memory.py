"""What the pipelines take of memory, over many epochs and where there is too little."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from lockstep.config import AugmentConfig, DataConfig
from lockstep.data import folder
from lockstep.data.loaders import TrainLoader, reader_for
from lockstep.data.readers import Placement
from lockstep.data.sets import InputSpec, UserSplit
from lockstep.data.sharding import Sharding

CPU = torch.device("cpu")
SPEC = InputSpec(3, 224, 224, (0.5,) * 3, (0.25,) * 3)


def _family_bytes() -> int:
    """Memory of this process and its children; what they share counts for each."""
    me = psutil.Process()
    return sum(process.memory_info().rss for process in [me, *me.children(recursive=True)])


def _in_fresh_process(call: str, *before: str) -> subprocess.CompletedProcess[str]:
    """Evaluate a call of this module in a process where nothing else takes memory, and what is free is given back."""
    script = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import test_memory as t; t.{call}"
    command = [*before, sys.executable, "-W", "ignore", "-c", script]
    settled = os.environ | {"MALLOC_ARENA_MAX": "1", "MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_MMAP_THRESHOLD_": "65536"}
    return subprocess.run(command, capture_output=True, text=True, timeout=200, env=settled)


def _growth(in_memory: str, processes: int, path: str) -> None:
    """Print how many bytes 15 epochs have added."""
    config = DataConfig(dataset=path, in_memory=in_memory, image_size=224)  # type: ignore[arg-type]
    data = folder.load(Path(path), config)
    augment = AugmentConfig(flip=True)
    reader = reader_for(data.train, data.input, Placement(CPU), augment, processes=processes)
    loader = TrainLoader(reader, Sharding(len(data.train), 16), CPU)
    sizes = []
    for epoch in range(20):
        for batch in loader.epoch(epoch):
            batch.images.sum()
        sizes.append(_family_bytes())
    reader.close()
    print(sizes[-1] - sizes[4])


@pytest.mark.parametrize(("in_memory", "processes"), [("never", 0), ("never", 2), ("always", 0)])
def test_memory_does_not_grow_over_20_epochs(in_memory: str, processes: int, new_folder: Callable[..., Path]) -> None:
    path = new_folder(sizes=((300, 200), (240, 260)), train=20, val=1)
    done = _in_fresh_process(f"_growth({in_memory!r}, {processes}, {str(path)!r})")
    # A batch that every epoch left behind would be 36 MB as bytes; a pipeline may have one batch more at the end.
    assert int(done.stdout) < 12e6, done.stderr


class _Blank:
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.zeros(3, 224, 224), index


def _take_an_epoch(kind: str, path: str) -> None:
    split = UserSplit(_Blank()) if kind == "user" else folder.load(Path(path), DataConfig(dataset=path)).train
    reader = reader_for(split, SPEC, Placement(CPU), AugmentConfig(), processes=1)
    list(reader.read([np.arange(32)] * 3, 0))


@pytest.mark.parametrize("kind", ["files", "user"])
def test_full_shared_memory_is_an_error_with_a_remedy(kind: str, new_folder: Callable[..., Path]) -> None:
    path = new_folder(sizes=((300, 200), (240, 260)), train=32, val=1)
    small = 'mount -t tmpfs -o size=1m none /dev/shm || exit 77; exec "$@"'
    if os.geteuid() or not shutil.which("unshare"):
        pytest.skip("needs a mount namespace of its own")
    done = _in_fresh_process(f"_take_an_epoch({kind!r}, {str(path)!r})", "unshare", "-m", "sh", "-c", small, "sh")
    if done.returncode == 77 or "unshare failed" in done.stderr:
        pytest.skip("may not mount")
    assert done.returncode == 1
    assert "DataError: shared memory is full: a loader process needs" in done.stderr
    assert "enlarge /dev/shm" in done.stderr
