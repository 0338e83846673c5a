"""Copy Lockstep's packages for jobs in images that lack them, once for each version of their files."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from lockstep.launch.controller.start_errors import StartError
from lockstep.launch.plan.containers import OTHERS, packages

UNUSED_SECONDS = 30 * 86400.0  # until a copy is removed


def copy_packages(folder: Path) -> None:
    """Make the folder, if it does not exist; remove those of other versions that were not used for long.

    `first` has Lockstep's own packages, which come before an image's; `last` has others, for images that lack them.

    Raises:
        StartError: It cannot be written.
    """
    try:
        if not (folder / "first" / "lockstep").is_dir():  # docker makes an empty folder where there is none
            _copy(folder)
        os.utime(folder)
        for other in folder.parent.glob("*packages-*"):
            with suppress(OSError):  # another launch removes it, for example
                if time.time() - other.stat().st_mtime > UNUSED_SECONDS:
                    shutil.rmtree(other, ignore_errors=True)
    except OSError as error:
        why = error.strerror or error
        raise StartError(f"Lockstep's packages cannot be copied for the image to {folder.parent}: {why}") from None


def _copy(folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    new = Path(tempfile.mkdtemp(prefix=".packages-", dir=folder.parent))
    try:
        for name, source in packages().items():
            target = new / ("last" if name in OTHERS else "first")
            target.mkdir(exist_ok=True)
            if source.is_file():
                shutil.copy2(source, target)
            else:
                shutil.copytree(source, target / name, ignore=shutil.ignore_patterns("__pycache__"))
        with suppress(OSError):  # another launch was faster
            new.rename(folder)
    finally:
        shutil.rmtree(new, ignore_errors=True)
