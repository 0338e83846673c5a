"""Shared by all tests: small data, the real images beside the project, and one thread, so that forking is safe."""

from __future__ import annotations

import itertools
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from cold_starts import only_marked_tests_start_python  # noqa: F401
from commands import pytest_xdist_setupnodes  # noqa: F401
from disks import room  # noqa: F401
from gloo_hangs import pytest_pyfunc_call  # noqa: F401
from hypothesis import HealthCheck, settings
from name_service import names  # noqa: F401
from new_module import new_module  # noqa: F401
from one_queue import pytest_cmdline_main, pytest_xdist_make_scheduler  # noqa: F401
from PIL import Image
from simulated_gpu import simulated_gpu  # noqa: F401
from stand_in_accelerators import accelerators, device_module  # noqa: F401
from staying_node import node  # noqa: F401
from temporary_files import temporary_files  # noqa: F401
from time_limits import pytest_timeout_set_timer  # noqa: F401

# Worker processes are forked from this one; a pool of OpenMP threads would not survive that.
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)
# Threads of programs under test that wait for work would keep the cores from the other tests.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Otherwise each process of a test run compiles all tests, and each program that they start what it uses of Lockstep.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# A run's records name the commits of its code, for which Git would compare all files of this checkout each time.
os.environ["GIT_DIR"] = os.devnull
# A shell has what it starts in the background ignore Ctrl-C, and all that this starts, which the tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# readline sets these in the process that hands the tests out; programs would take them for the size of their terminal.
for name in ("LINES", "COLUMNS"):
    os.environ.pop(name, None)
# On a loaded machine any example may stand still for a while.
settings.register_profile("loaded", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("loaded")

SHARED = Path(__file__).parents[2] / "shared" / "data"


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The real images that lie beside the project on the developers' machines."""
    if not SHARED.is_dir():
        pytest.skip(f"needs the image data in {SHARED}")
    return SHARED


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The temporary folder as the current one."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of 40 + 10 small color images of two classes, one reddish and one bluish."""
    return make_folder(tmp_path / "images")


@pytest.fixture
def new_folder(tmp_path: Path) -> Callable[..., Path]:
    """Makes another such folder at each call; takes `make_folder`'s options."""
    numbers = itertools.count()
    return lambda **options: make_folder(tmp_path / f"images-{next(numbers)}", **options)


def make_folder(root: Path, sizes: tuple[tuple[int, int], ...] = ((16, 12),), train: int = 20, val: int = 5) -> Path:
    """Make `train` + `val` images a class, of the given sizes (width, height) in turn."""
    generator = np.random.default_rng(0)
    for split, count in (("train", train), ("val", val)):
        for name, channel in (("blue", 2), ("red", 0)):
            path = root / split / name
            path.mkdir(parents=True)
            for number in range(count):
                width, height = sizes[number % len(sizes)]
                pixels = generator.integers(0, 120, (height, width, 3), dtype=np.uint8)
                pixels[:, :, channel] += 100
                Image.fromarray(pixels).save(path / f"{number:03d}.png")
    return root
