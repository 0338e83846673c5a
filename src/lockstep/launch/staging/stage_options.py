"""`--stage`: shared files that are copied to each host's own disk before the workers start, and how they are found.

The copies of a path have the same path on all hosts. Arguments of the command that name files in a staged path are
replaced; scripts that find their data in another way ask `lockstep.staged`. The folders of a staged Python environment
are replaced in `sys.path` before anything else is imported, so other programs that a worker starts are not affected.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated

from lockstep.config.flags import arg
from lockstep.errors import ConfigError
from lockstep.files.staged import STAGED

ENVIRONMENT = "environment"
PREFIX = "lockstep-staged-"
LIBRARIES = ("lib", "lib64")
# Caches that are in the user's home by default, and their folders with the copies. That of torch.compile is in TMPDIR;
# matplotlib's cannot be moved without its settings.
CACHES = {"TRITON_CACHE_DIR": "triton", "MIOPEN_USER_DB_PATH": "miopen", "MIOPEN_CUSTOM_CACHE_DIR": "miopen"}
OF_THE_SYSTEM = ("/usr/", "/lib/", "/lib64/")  # on each host's own disk anyway


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
        for source in self.sources:
            if source != ENVIRONMENT and (source == "/" or not os.path.isabs(source)):
                why = f"must be an absolute path, which the command has too, or {ENVIRONMENT}"
                raise ConfigError(f"--stage {source}: {why}")
        if self.stage_dir and not os.path.isabs(self.stage_dir):
            raise ConfigError(f"--stage-dir {self.stage_dir}: must be an absolute path")

    @property
    def sources(self) -> tuple[str, ...]:
        """ENVIRONMENT or absolute paths."""
        given = (each.strip() for each in self.stage.split(","))
        return tuple(dict.fromkeys(os.path.normpath(each) for each in given if each))

    @property
    def folder(self) -> str:
        """The folder for this launcher's copies on each host."""
        return os.path.join(self.stage_dir or tempfile.gettempdir(), f"{PREFIX}{_token(os.getpid())}")


@cache
def _token(launcher: int) -> str:
    return secrets.token_hex(8)


def cache_variables(staging: StageOptions) -> dict[str, str]:
    """Return the variables that move caches to the hosts' disks, for a staged environment."""
    return {name: os.path.join(staging.folder, "caches", folder) for name, folder in CACHES.items()}


def environment_folders(entries: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return the `lib` folders to copy for entries of `sys.path`, each with the paths in it to leave out.

    They are copied whole, because libraries of packages find those of others by paths relative to their own; but not
    the packages of a Python whose virtual environment does not see them. Entries that are not in a `lib/pythonX.Y` of
    this version are read where they are, such as the source of a package that is being developed, whose folder may have
    anything beside it.
    """
    name = "python{}.{}".format(*sys.version_info)
    paths = [os.path.abspath(entry) for entry in entries if entry]
    folders = []
    for path in paths:
        before, found, _ = f"{path}/".rpartition(f"/{name}/")
        if found and os.path.basename(before) in LIBRARIES and not f"{before}/".startswith(OF_THE_SYSTEM):
            folders.append(before)
    packages = f"{name}/site-packages"
    return {
        folder: () if any(f"{path}/".startswith(f"{folder}/{packages}/") for path in paths) else (packages,)
        for folder in folders
    }


def with_copies(command: Sequence[str], copies: Mapping[str, str]) -> tuple[str, ...]:
    """Return a command whose arguments name the copies of their paths.

    The program itself is not replaced: a copied Python would not be that of the environment.
    """
    program, *arguments = command
    return (
        program,
        *(each.removesuffix(path_in(each)) + copies.get(path_in(each), path_in(each)) for each in arguments),
    )


def path_in(argument: str) -> str:
    """Return the path in `--flag=PATH`, or the whole argument."""
    _, is_assigned, value = argument.partition("=")
    return value if is_assigned and not argument.startswith("/") else argument


def staged_variable(copies: Mapping[str, str]) -> dict[str, str]:
    """Return the variable by which workers find the copies."""
    return {STAGED: json.dumps(copies)} if copies else {}
