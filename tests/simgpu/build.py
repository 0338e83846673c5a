"""Compile the simulated device, once per torch, Python and source, into a cache folder outside the repository."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch

NAME = "simgpu_extension"
SOURCES = Path(__file__).with_name("csrc")
JOBS = int(os.environ.get("SIMGPU_BUILD_JOBS", "2"))
KEPT_LINES = 30  # of a compiler's errors
FLAGS = ("-std=c++20", "-O0", "-fPIC", "-w", "-fvisibility=hidden", f"-DTORCH_EXTENSION_NAME={NAME}")


class BuildError(RuntimeError):
    """The device cannot be built on this machine."""


def built() -> Path:
    """Return the extension's file; compile it first if the cache has none for this torch, Python and source.

    Raises:
        BuildError: There is no compiler, or it fails.
    """
    target = _cache() / _key() / f"{NAME}.so"
    if target.exists():
        return target
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")
    if compiler is None:
        raise BuildError("the simulated device needs a C++ compiler, such as g++")
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target.with_suffix(".lock")):
        if not target.exists():
            _compile(compiler, target)
    return target


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(base) / "lockstep-simgpu"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        folder = Path(tempfile.gettempdir()) / f"lockstep-simgpu-{os.getuid()}"
        folder.mkdir(exist_ok=True)
    return folder


def _key() -> str:
    digest = hashlib.sha256(" ".join(FLAGS).encode())
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    python = f"{sys.implementation.cache_tag}"
    return f"torch-{torch.__version__}-{python}-{digest.hexdigest()[:16]}"


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Let one process compile while the others wait."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _compile(compiler: str, target: Path) -> None:
    root = Path(torch.__file__).parent
    includes = [root / "include", root / "include/torch/csrc/api/include", Path(sysconfig.get_paths()["include"])]
    flags = [
        *FLAGS,
        *(f"-I{path}" for path in includes),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
    ]
    sources = sorted(SOURCES.glob("*.cpp"), key=lambda path: -path.stat().st_size)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder, ThreadPoolExecutor(JOBS) as pool:
        objects = [Path(folder) / f"{source.stem}.o" for source in sources]
        commands = [[compiler, *flags, "-c", source, "-o", out] for source, out in zip(sources, objects, strict=True)]
        for _ in pool.map(_run, commands):
            pass
        libraries = ["-ltorch", "-ltorch_cpu", "-ltorch_python", "-lc10"]
        linked = Path(folder) / target.name
        _run(
            [compiler, "-shared", *objects, "-o", linked, f"-L{root / 'lib'}", *libraries, f"-Wl,-rpath,{root / 'lib'}"]
        )
        linked.rename(target)


def _run(command: Iterable[str | Path]) -> None:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    if done.returncode:
        errors = "\n".join(done.stderr.splitlines()[:KEPT_LINES])
        raise BuildError(f"the simulated device does not compile:\n{errors}")
