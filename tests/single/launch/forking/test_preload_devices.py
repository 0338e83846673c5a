"""Importing what workers are forked with asks for no GPU, and a forked worker still chooses its own.

`import torch` itself loads libcuda.so.1 (cuBLASLt and cuSPARSELt do, as they are loaded), and calls nothing in it.
CUDA_VISIBLE_DEVICES is read by the first cuInit, after which CUDA cannot be used in a forked process.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.launch.forking.python_command import PRELOADED_FOR_LOCKSTEP, USED_BY

ALL = (*PRELOADED_FOR_LOCKSTEP, *USED_BY.values())

pytestmark = [
    pytest.mark.cold,
    pytest.mark.skipif(sys.platform != "linux", reason="the NVIDIA driver's library of Linux"),
]

# A driver without a GPU: cudart finds all its functions, and each call is written down with the GPUs that it may see.
DRIVER = r"""
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int record(const char *call) {
  const char *visible = getenv("CUDA_VISIBLE_DEVICES");
  char line[256];
  int length = snprintf(line, sizeof line, "%s %s\n", call, visible ? visible : "all");
  int file = open(getenv("RECORDED_CALLS"), O_WRONLY | O_CREAT | O_APPEND, 0600);
  if (file < 0 || write(file, line, length) != length) abort();
  close(file);
  return 100; /* CUDA_ERROR_NO_DEVICE, and of NVML an error too */
}
__attribute__((constructor)) static void loaded(void) { record("load"); }
int cuInit(unsigned flags) { return record("cuInit"); }
int cuDriverGetVersion(int *version) { record("cuDriverGetVersion"); *version = 99000; return 0; }
int nvmlInit(void) { return record("nvmlInit"); }
int nvmlInit_v2(void) { return record("nvmlInit"); }
int nvmlInitWithFlags(unsigned flags) { return record("nvmlInit"); }
static int other(void) { return record("other"); }
int cuGetProcAddress_v2(const char *name, void **function, int version, unsigned long flags, int *status) {
  *function = !strcmp(name, "cuInit") ? (void *)cuInit
      : !strcmp(name, "cuDriverGetVersion") ? (void *)cuDriverGetVersion
      : !strncmp(name, "cuGetProcAddress", 16) ? (void *)cuGetProcAddress_v2 : (void *)other;
  if (status) *status = 0;
  return 0;
}
int cuGetProcAddress(const char *name, void **function, int version, unsigned long flags) {
  return cuGetProcAddress_v2(name, function, version, flags, NULL);
}
"""
# What each child asks for, after the import, with variables of its own.
CHILDREN = {
    "nvml": ({"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}, "torch.cuda.is_available()"),
    "cuda": ({"PYTORCH_NVML_BASED_CUDA_CHECK": "0"}, "torch.cuda.is_available()"),
    "chosen": (
        {"CUDA_VISIBLE_DEVICES": "7"},
        "is_bad = torch.cuda._is_in_bad_fork(); torch.cuda.is_available(); os._exit(is_bad)",
    ),
}
FORK = """
import os, sys
import {modules}
for name, (variables, code) in {children}.items():
    process = os.fork()
    if process == 0:
        os.environ.update(variables, RECORDED_CALLS=os.environ["RECORDED_CALLS"] + "." + name)
        exec(code)
        os._exit(0)
    if code := os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]):
        sys.exit(f"{{name}}: exit code {{code}}")
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the recording libraries of the driver and of NVML."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("driver")
    (folder / "driver.c").write_text(DRIVER)
    for name in ("libcuda.so.1", "libnvidia-ml.so.1"):
        words = ["-shared", "-fPIC", "-w", "-o", str(folder / name), str(folder / "driver.c")]
        subprocess.run([compiler, *words], check=True)
    return folder


@pytest.fixture(scope="module")
def record(driver: Path) -> Path:
    """What importing all that is preloaded calls of the driver and of NVML; beside it, what forked children call."""
    record = driver / "calls"
    children = CHILDREN if has_cuda() else {}
    code = FORK.format(modules=", ".join(ALL), children=children)
    run(code, {"LD_LIBRARY_PATH": str(driver), "RECORDED_CALLS": str(record)})
    return record


def run(code: str, more: dict[str, str]) -> None:
    own = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    subprocess.run([sys.executable, "-c", code], env={**own, **more}, check=True, timeout=120)


def calls(record: Path) -> list[str]:
    """What was called, each with CUDA_VISIBLE_DEVICES; loading the libraries is not a call."""
    lines = record.read_text().splitlines() if record.exists() else []
    return [line for line in lines if not line.startswith("load ")]


def test_importing_what_is_preloaded_calls_no_driver(record: Path) -> None:
    assert calls(record) == []


def has_cuda() -> bool:
    import torch

    return torch.version.cuda is not None


@pytest.mark.parametrize("nvml", ["0", "1"])
def test_asking_for_a_gpu_is_recorded(record: Path, nvml: str) -> None:
    if not has_cuda():
        pytest.skip("this torch has no CUDA")
    found = calls(record.with_name("calls.nvml" if nvml == "1" else "calls.cuda"))
    assert "cuInit all" in found
    assert ("nvmlInit all" in found) == (nvml == "1")


def test_a_forked_worker_chooses_its_gpus_before_its_first_use(record: Path) -> None:
    if not has_cuda():
        pytest.skip("this torch has no CUDA")
    found = calls(record.with_name("calls.chosen"))
    assert "cuInit 7" in found
    assert {line.split()[1] for line in found} == {"7"}
