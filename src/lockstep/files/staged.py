"""The copies of shared files on this host's disk, which `--stage` has made before the workers started."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping

STAGED = "LOCKSTEP_STAGED"  # a JSON object from paths to their copies


def staged(path: str | os.PathLike[str]) -> str:
    """Return the path of a shared file or folder's copy on this host's disk; the path itself if it was not staged.

        dataset = ImageFolder(lockstep.staged("/shared/images"))

    Args:
        path: A path that `lockstep run --stage PATH` was given, or one within it.
    """
    return copy_of(os.path.abspath(path), copies(os.environ)) or os.fspath(path)


def copies(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the copy of each staged path."""
    return json.loads(environment.get(STAGED) or "{}")  # type: ignore[no-any-return]


def copy_of(path: str, copies: Mapping[str, str]) -> str:
    """Return the path within a copy, if an absolute path is in one of the copied paths; "" if it is not."""
    path = "/" + os.path.normpath(path).lstrip("/")
    for source, copy in copies.items():
        if f"{path}/".startswith(f"{source}/"):
            return copy + path[len(source) :]
    return ""
