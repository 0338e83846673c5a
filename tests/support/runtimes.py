"""An image for Charliecloud, and stand-ins for other container runtimes, which run their command by bubblewrap.

Each takes its own command line, and refuses others. Their image is empty but for the bound folders, so that these have
to include the programs. As the real ones do, Apptainer and Shifter hand on the variables, Docker and Podman none; all
have a root that cannot be written.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

# The images have no programs; these folders have them, and torch.
PROGRAMS = [path for path in dict.fromkeys(map(str, ("/usr", sys.base_prefix, sys.prefix))) if path != "/"]
BOUND = ",".join(path for path in PROGRAMS if not Path(path).is_relative_to("/tmp"))  # Charliecloud has /tmp anyway


def make_image(root: Path) -> Path:
    """Make the tree of an image for Charliecloud, with a folder for each one that is bound."""
    inside = [path.removeprefix("/") for path in PROGRAMS]
    for name in ("etc", "dev", "proc", "sys", "tmp", "home", "root", "run", "mnt/9", "opt", *inside):
        (root / name).mkdir(parents=True, exist_ok=True)
    for name in ("bin", "sbin", "lib", "lib64"):
        (root / name).symlink_to(f"usr/{name}")
    for name in ("passwd", "group", "hosts", "resolv.conf"):
        (root / "etc" / name).touch()
    return root


RUNTIMES = ("apptainer", "singularity", "shifter", "podman-hpc", "podman", "docker")


def install(folder: Path, name: str) -> str:
    """Write a runtime into a folder; return a PATH with it."""
    folder.mkdir(exist_ok=True)
    program = folder / name
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{__file__}" {name} "$@"\n')
    program.chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


def parser_of(runtime: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=runtime, allow_abbrev=False)
    parser.set_defaults(env=[], mounts=[], image="", network="host", ipc="host", pid="host", entrypoint="")
    if runtime in ("apptainer", "singularity"):
        parser.add_argument("action", choices=["exec"])
        parser.add_argument("--bind", dest="mounts", action="append")
        parser.add_argument("--pwd", dest="folder")
        for gpus in ("--nv", "--rocm"):
            parser.add_argument(gpus, action="store_true")
    elif runtime == "shifter":
        parser.add_argument("--image")
        parser.add_argument("--volume", dest="mounts", action="append")
        parser.add_argument("--workdir", dest="folder")
    else:
        parser.add_argument("action", choices=["run"])
        for flag in ("--rm", "--interactive", "--read-only"):
            parser.add_argument(flag, action="store_true", required=True)
        for flag in ("--network", "--ipc", "--pid"):
            parser.add_argument(flag, choices=["host"], required=True)
        parser.add_argument("--entrypoint")
        parser.add_argument("--volume", dest="mounts", action="append")
        parser.add_argument("--workdir", dest="folder")
        parser.add_argument("--env", action="append")
        own = {
            "docker": ("--gpus", "--user", "--ulimit"),
            "podman": ("--userns", "--read-only-tmpfs"),
            "podman-hpc": (),
        }
        for flag in own[runtime]:
            parser.add_argument(flag)
        if runtime == "podman-hpc":
            parser.add_argument("--gpu", action="store_true")
        else:
            parser.add_argument("--device", action="append")
            parser.add_argument("--group-add")
    if runtime != "shifter":
        parser.add_argument("image")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    return parser


def main() -> None:
    runtime, *words = sys.argv[1:]
    given = parser_of(runtime).parse_args(words)
    box = ["bwrap", "--die-with-parent", "--tmpfs", "/", "--proc", "/proc", "--dev-bind", "/dev", "/dev"]
    for name in ("bin", "sbin", "lib", "lib64"):
        box += ["--symlink", f"usr/{name}", f"/{name}"]
    if runtime not in ("docker", "podman", "podman-hpc"):
        box += ["--bind", "/tmp", "/tmp"]
    if runtime == "shifter":  # the file systems of the site, at their places
        given.mounts += [f"{path}:{path}" for path in ("/root", "/home") if os.path.isdir(path)]
    for mount in given.mounts:
        outside, _, inside = mount.partition(":")
        box += ["--bind", outside, inside]
    if runtime in ("docker", "podman", "podman-hpc"):
        box += ["--clearenv", "--setenv", "PATH", "/usr/bin:/bin"]
        for name, _, value in (each.partition("=") for each in given.env):
            box += ["--setenv", name, value]
    box += ["--remount-ro", "/", "--chdir", given.folder, "--"]
    command = [given.entrypoint, *given.command] if given.entrypoint else given.command
    os.execvp(box[0], [*box, *command])


if __name__ == "__main__":
    main()
