"""Coverage-guided fuzzing of one target: `python tests/faults/fuzz/atheris_run.py TARGET FOLDER -runs=10000`.

FOLDER keeps the corpus; more words go to libFuzzer. It needs `pip install atheris` beside Lockstep's own packages. What
counts as a failure is the same as in run.py.
"""

from __future__ import annotations

import os
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["lockstep", "tarfile", "yaml", "pickle", "json"]):
    from targets import TARGETS  # imports what it needs of Lockstep when a target is made

    import lockstep  # noqa: F401


def main() -> None:
    from run import Canary

    name, corpus, *words = sys.argv[1:]
    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
    os.chdir(folder)
    canary = Canary(folder)
    with atheris.instrument_imports(include=["lockstep", "tarfile", "yaml", "pickle", "json"]):
        target = TARGETS[name](folder)
        with suppress(*target.allowed):
            target.read(target.seed)
    Path(corpus).mkdir(parents=True, exist_ok=True)
    (Path(corpus) / "seed").write_bytes(target.seed)

    def feed(data: bytes) -> None:
        canary.listens = True
        try:
            target.read(data)
        except target.allowed:
            pass
        finally:
            canary.listens = False
        assert not canary.sung, canary.sung[0]

    atheris.Setup([sys.argv[0], "-timeout=20", "-rss_limit_mb=4096", "-max_len=65536", corpus, *words], feed)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
