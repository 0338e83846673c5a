"""`--stage`: shared files that are copied to each host's own disk before the workers start, and how they are found.

The copies of a path have the same path on all hosts. Arguments of the command that lie in a staged path are replaced;
scripts that find their data in another way ask `lockstep.staged`. The folders of a staged Python environment are
replaced in `sys.path` before anything else is imported, so other programs that a worker starts are not affected.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Annotated

from lockstep.config.flags import arg
from lockstep.errors import ConfigError
from lockstep.world.staged import STAGED, copy_of

ENVIRONMENT = "environment"
PREFIX = "lockstep-staged-"
FLAGS = ("--stage", "--stage-dir")
OF_THE_SYSTEM = ("/usr", "/lib", "/lib64")  # on each host's own disk anyway


@dataclass(frozen=True)
class StageOptions:
    """Shared files to copy to the disks of the hosts."""

    stage: Annotated[str, arg(metavar="environment|PATH")] = ""
    """Shared files to copy to each host's disk; commas separate several."""
    stage_dir: Annotated[str, arg(metavar="DIR")] = ""
    """Folder on each host for the copies. Default: TMPDIR, or /tmp."""

    def __post_init__(self) -> None:
        if self.stage_dir and not self.stage:
            raise ConfigError(f"--stage-dir {self.stage_dir} needs --stage environment, or --stage PATH")
        for flag, path in (*(("--stage", each) for each in self.sources), ("--stage-dir", self.stage_dir)):
            if path not in ("", ENVIRONMENT) and not os.path.isabs(path):
                raise ConfigError(f"{flag} {path}: must be an absolute path{_words(flag)}")
            if {":", "="} & {*path}:
                raise ConfigError(f"{flag} {path}: cannot contain : or =")

    @property
    def sources(self) -> tuple[str, ...]:
        """ENVIRONMENT or paths."""
        given = (each.strip() for each in self.stage.split(","))
        return tuple(dict.fromkeys(each if each == ENVIRONMENT else os.path.normpath(each) for each in given if each))

    @property
    def arguments(self) -> list[str]:
        """The flags again."""
        given = zip(FLAGS, (self.stage, self.stage_dir), strict=True)
        return [word for flag, value in given if value for word in (flag, value)]


def _words(flag: str) -> str:
    return f", or {ENVIRONMENT}; the command names it by the same path" if flag == "--stage" else ""


@dataclass(frozen=True)
class Staging:
    """What a job copies to its hosts.

    Args:
        sources: ENVIRONMENT or absolute paths.
        folder: The folder for the copies on each host.
    """

    sources: tuple[str, ...]
    folder: str

    @property
    def paths(self) -> tuple[str, ...]:
        return tuple(source for source in self.sources if source != ENVIRONMENT)


def find_staging(options: StageOptions) -> Staging | None:
    """Return what the options describe; None without them."""
    if not options.sources:
        return None
    folder = options.stage_dir or tempfile.gettempdir()
    return Staging(options.sources, os.path.join(folder, f"{PREFIX}{os.getuid()}"))


def environment_folders(entries: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return the `lib` folders to copy for entries of `sys.path`, each with the paths in it to leave out.

    They are copied whole, because libraries of packages find those of others by paths relative to their own; but not
    the packages of a Python whose virtual environment does not see them. Entries that are not in a `lib/pythonX.Y` of
    this version are read where they are, such as the source of a package that is being developed, whose folder may have
    anything beside it.
    """
    name = "python{}.{}".format(*sys.version_info)
    folders = []
    for entry in entries:
        parts = PurePath(entry).parts
        if name in parts[1:] and not entry.startswith(tuple(f"{each}/" for each in OF_THE_SYSTEM)):
            folders.append(str(PurePath(*parts[: parts.index(name)])))
    packages = f"{name}/site-packages"
    return {folder: () if f"{folder}/{packages}" in entries else (packages,) for folder in folders}


def with_copies(command: Sequence[str], copies: Mapping[str, str]) -> tuple[str, ...]:
    """Return a command whose arguments, or their parts after "=", name the copies of paths.

    Args:
        copies: The copy of each path.
    """
    return tuple(_with_copy(argument, copies) for argument in command)


def _with_copy(argument: str, copies: Mapping[str, str]) -> str:
    flag, is_assigned, value = argument.partition("=")
    if is_assigned and (copy := copy_of(value, copies)) != value:
        return f"{flag}={copy}"
    return copy_of(argument, copies)


def staged_variable(copies: Mapping[str, str]) -> dict[str, str]:
    """Return the variable by which workers find the copies."""
    return {STAGED: ":".join(f"{source}={copy}" for source, copy in copies.items())} if copies else {}
