"""ImageNet's meta.mat: the WordNet number of each class that has images, by its ILSVRC2012_ID.

SciPy's reader crashes on some damaged files, so it runs in a process of its own, of bounded memory and time, which
gets the file on its standard input and answers in JSON.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from io import BytesIO
from typing import Any

from lockstep.errors import DataError
from lockstep.files.untrusted import parse_json

MEMORY_BYTES = 4 << 30
SECONDS = 60
CPU_SECONDS = 20  # a sound file takes one


def read(meta: bytes) -> dict[int, str]:
    """The classes without children by their numbers.

    Raises:
        DataError: SciPy is not installed.
        ValueError: The file is damaged, or another one.
    """
    if find_spec("scipy") is None:
        raise DataError(
            "the devkit's meta.mat is read with SciPy, which is not installed: pip install 'lockstep-torch[imagenet]'"
        )
    command = [sys.executable, "-P", "-m", __name__]  # -P: not the folder's own scipy/
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}  # the memory of more counts as used
    try:
        done = subprocess.run(command, input=meta, capture_output=True, timeout=SECONDS, env=environment, check=False)
    except subprocess.TimeoutExpired:
        raise ValueError(f"meta.mat cannot be read within {SECONDS} s") from None
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        raise ValueError(f"meta.mat cannot be read: {said[-1][:200] if said else f'exit code {done.returncode}'}")
    leaves = {int(number): str(name) for number, name in parse_json(done.stdout).items()}
    odd = [name for name in leaves.values() if not re.fullmatch(r"n\d{8}", name, re.ASCII)]
    if odd or not leaves:
        raise ValueError(f"meta.mat names class {odd[0]!r}" if odd else "meta.mat has no classes")
    return leaves


def _main() -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    from scipy.io import loadmat

    content = BytesIO(sys.stdin.buffer.read())
    synsets: Any = loadmat(content, squeeze_me=True, struct_as_record=True)["synsets"]
    rows = [row for row in synsets.ravel() if int(row["num_children"]) == 0]
    print(json.dumps({int(row["ILSVRC2012_ID"]): str(row["WNID"]) for row in rows}))


if __name__ == "__main__":
    _main()
