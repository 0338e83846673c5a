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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

NAME = "simgpu_extension"
SOURCES = Path(__file__).with_name("csrc")
PYTHON_HEADERS = Path(sysconfig.get_paths()["include"])
KEPT_LINES = 30  # of a compiler's errors
FLAGS = ("-std=c++20", "-O0", "-fPIC", "-w", "-fvisibility=hidden", f"-DTORCH_EXTENSION_NAME={NAME}")


class MissingCompilerError(RuntimeError):
    """The device cannot be compiled on this machine."""


def built() -> Path:
    """Return the extension's file; compile it first if the cache has none for this torch, Python and source.

    Raises:
        MissingCompilerError: There is no compiler, or Python's headers are missing.
        RuntimeError: The source does not compile.
    """
    target = _cache() / key_of(SOURCES) / f"{NAME}.so"
    if target.exists():
        return target
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")
    if compiler is None:
        raise MissingCompilerError("the simulated device needs a C++ compiler, such as g++")
    if not (PYTHON_HEADERS / "Python.h").exists():
        raise MissingCompilerError(f"the simulated device needs Python's headers in {PYTHON_HEADERS}")
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


def key_of(sources: Path) -> str:
    digest = hashlib.sha256(" ".join([*_flags(), str(torch.version.git_version)]).encode())
    for path in sorted(sources.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return f"torch-{torch.__version__}-{sys.implementation.cache_tag}-{digest.hexdigest()[:16]}"


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Let one process compile while the others wait."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _flags() -> list[str]:
    # Extensions share pybind11's types with torch if these equal torch's own.
    names = {name: getattr(torch._C, f"_PYBIND11_{name}", None) for name in ("COMPILER_TYPE", "STDLIB", "BUILD_ABI")}
    abi = [f'-DPYBIND11_{name}="{value}"' for name, value in names.items() if value is not None]
    abi.append(f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}")
    return [*FLAGS, *abi]


def _compile(compiler: str, target: Path) -> None:
    root = Path(torch.__file__).parent
    includes = [f"-I{path}" for path in (root / "include", root / "include/torch/csrc/api/include", PYTHON_HEADERS)]
    libraries = [f"-L{root / 'lib'}", "-ltorch", "-ltorch_cpu", "-ltorch_python", "-lc10"]
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        whole, linked = Path(folder, "whole.cpp"), Path(folder, target.name)  # torch's headers are parsed once: 30 s
        whole.write_text("".join(f'#include "{path}"\n' for path in sorted(SOURCES.glob("*.cpp"))))
        command = [compiler, *_flags(), *includes, "-shared", whole, "-o", linked, *libraries]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            errors = "\n".join(done.stderr.splitlines()[:KEPT_LINES])
            raise RuntimeError(f"the simulated device does not compile:\n{errors}")
        linked.rename(target)
