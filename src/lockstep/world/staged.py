"""The copies of shared files on this host's disk, which `--stage` has made before the workers started."""

from __future__ import annotations

import os
from collections.abc import Mapping

STAGED = "LOCKSTEP_STAGED"  # pairs PATH=COPY, separated by colons


def staged(path: str | os.PathLike[str]) -> str:
    """Return the path of a shared file or folder's copy on this host's disk; the path itself if it was not staged.

        dataset = ImageFolder(lockstep.staged("/shared/images"))

    Args:
        path: A path that `lockstep run --stage PATH` was given, or one within it.
    """
    absolute = os.path.abspath(path)
    copy = copy_of(absolute, copies(os.environ))
    return os.fspath(path) if copy == absolute else copy


def copies(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the copy of each staged path."""
    pairs = filter(None, environment.get(STAGED, "").split(":"))
    return {source: copy for source, _, copy in (pair.partition("=") for pair in pairs)}


def copy_of(path: str, copies: Mapping[str, str]) -> str:
    """Return the path within a copy, if it is in one of the copied paths."""
    for source, copy in copies.items():
        if f"{path}/".startswith(f"{source}/"):
            return copy + path[len(source) :]
    return path
