"""The exit of a worker that was forked from a process with torch: what it copies, and what still happens then."""

from __future__ import annotations

import mmap
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import own_environment
from forked import Preloaded, preloaded

from lockstep.launch.forking.python_command import PRELOADED

pytestmark = [pytest.mark.skipif(sys.platform != "linux", reason="workers are forked only on Linux"), pytest.mark.cold]

USER = """
import resource, sys
import torch, torch._dynamo

layer = torch.nn.Linear(4, 4)
layer(torch.ones(4)).sum().backward()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
"""
LIBRARY = """
#include <stdio.h>
#include <stdlib.h>
static void handler(void) { printf("handler\\n"); }
__attribute__((constructor)) static void begin(void) { atexit(handler); }
__attribute__((destructor)) static void end(void) { printf("destructor\\n"); }
"""
EXIT_BYTES = 130e6  # 60 MB as measured; 200 MB if the interpreter clears torch's modules


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Preloaded]:
    with preloaded(tmp_path_factory.mktemp("preloaded"), *PRELOADED) as process:
        yield process


def test_exit_copies_few_preloaded_pages_and_prints_nothing(worker: Preloaded, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(USER)
    done = worker.run("script.py", folder=tmp_path)
    assert (done.code, done.errors) == (0, "")
    assert (worker.pages - int(done.output)) * mmap.PAGESIZE < EXIT_BYTES


ENDS = {"": 0, "sys.exit(5)": 5, "sys.exit('text')": 1, "1 / 0": 1, "raise KeyboardInterrupt": -2}


@pytest.fixture
def library(tmp_path: Path) -> Path:
    if not shutil.which("cc"):
        pytest.skip("needs a C compiler")
    (tmp_path / "library.c").write_text(LIBRARY)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", "library.so", "library.c"], cwd=tmp_path, check=True)
    return tmp_path / "library.so"


def test_the_exit_handlers_of_the_scripts_libraries_run(worker: Preloaded, tmp_path: Path, library: Path) -> None:
    for end, code in ENDS.items():
        (tmp_path / "script.py").write_text(f"import ctypes, sys, torch\nctypes.CDLL({str(library)!r})\n{end}")
        done = worker.run("script.py", folder=tmp_path)
        assert (done.code, done.output) == (code, "handler\n" if code >= 0 else ""), end


def test_library_loaded_before_all_others_exits_as_usual(tmp_path: Path, library: Path) -> None:
    """Darshan, for example, writes its log in a destructor."""
    (tmp_path / "script.py").write_text("")
    environment = own_environment(LD_PRELOAD=str(library))
    with preloaded(tmp_path, "json", environment=environment) as process:
        done = process.run("script.py", folder=tmp_path, environment=environment)
    assert sorted(done.output.splitlines()) == ["destructor", "handler"]
