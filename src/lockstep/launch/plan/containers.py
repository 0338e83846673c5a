"""Containers: a host's node process starts inside an image, one container per host, and starts the workers there.

Each runtime makes visible the job's folder and the user's paths, and the host's network, shared memory, processes and
GPUs. An image cannot be written elsewhere, so that nothing that a job writes is lost with its container. Lockstep need
not be in the image: `lockstep.launch.controller.image_packages` copies its packages to the user's cache, and that
folder is made visible, too.

Sources: apptainer(1), ch-run(1), docker-run(1), podman-run(1); the documentation of podman-hpc and Shifter (NERSC) and
of pyxis (NVIDIA), which adds options to Slurm's srun.
"""

from __future__ import annotations

import hashlib
import importlib.util
import shlex
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Literal

from lockstep.config.flags import arg
from lockstep.errors import ConfigError
from lockstep.launch.plan.worker_variables import OF_THE_MACHINE

RuntimeName = Literal["apptainer", "singularity", "shifter", "podman-hpc", "charliecloud", "podman", "docker", "pyxis"]
PACKAGES = "LOCKSTEP_PACKAGES"  # inside: the folder of Lockstep's packages
OURS = ("lockstep", "horovod")
METADATA = "lockstep*.dist-info"  # beside them
# What Lockstep needs of others, for images that lack it: pure Python, or compiled for all versions of it. Images for
# training have torch, torchvision, NumPy and Pillow.
OTHERS = ("psutil", "cloudpickle", "yaml", "rich", "markdown_it", "mdurl", "pygments", "safetensors", "threadpoolctl")
OUTSIDE = ("env", *(word for name in OF_THE_MACHINE for word in ("-u", name)))
# Tests of the host, as shell text.
NVIDIA, AMD, INFINIBAND = "-e /dev/nvidiactl", "-e /dev/kfd", "-e /dev/infiniband"
ROOTLESS = '"$(id -u)" != 0'
IMAGE_FILES = (".sif", ".sqsh", ".sqfs", ".squashfs", ".img")


@dataclass(frozen=True)
class ContainerOptions:
    """An image that the workers run in."""

    container: Annotated[str, arg(metavar="IMAGE")] = ""
    """Image for the workers, which needs torch but not Lockstep."""
    container_runtime: Annotated[RuntimeName | None, arg(metavar="NAME")] = None
    """Such as apptainer or docker. Default: the first that is installed."""
    bind_mount: Annotated[str, arg(metavar="PATH[:INSIDE]")] = ""
    """Paths for the workers, such as data; commas separate several."""

    def __post_init__(self) -> None:
        for flag, value in (("--container-runtime", self.container_runtime), ("--bind-mount", self.bind_mount)):
            if value and not self.container:
                raise ConfigError(f"{flag} {value} needs --container IMAGE")


@dataclass(frozen=True)
class Runtime:
    """How a runtime starts a command in an image.

    Args:
        program: The words before the options; the first one is a program in PATH.
        mount: The option before a path.
        folder: The option before the working directory.
        image: The option before the image; "" if the image follows the options.
        where: Options for hosts that pass a test.
        packages: Where Lockstep's packages are visible inside; "": where they are outside.
        shell: What follows the image to run a script.
        visible: Folders of the host that are visible inside anyway.
        more: More options, as shell text.
    """

    program: tuple[str, ...]
    mount: str
    folder: str
    image: str = ""
    where: tuple[tuple[str, str], ...] = ()
    packages: str = "/opt/lockstep"
    shell: tuple[str, ...] = ("sh", "-c")
    visible: tuple[str, ...] = ()
    more: str = ""


def _apptainer(program: str) -> Runtime:
    return Runtime((program, "exec"), "--bind=", "--pwd=", where=((NVIDIA, "--nv"), (AMD, "--rocm")))


def _docker(program: str, *where: tuple[str, str], more: str = "") -> Runtime:
    shared = ("--network=host", "--ipc=host", "--pid=host", "--volume=/tmp:/tmp", "--entrypoint=sh")
    return Runtime(
        (program, "run", "--rm", "--interactive", "--read-only", *shared),
        "--volume=",
        "--workdir=",
        where=where,
        shell=("-c",),
        more=more,
    )


DEVICES = ((AMD, "--device=/dev/kfd --device=/dev/dri --group-add=video"), (INFINIBAND, "--device=/dev/infiniband"))
# Docker's images have no user, and torch names folders by the user's name.
USER = '--user="$(id -u):$(id -g)" --env=USER="$(id -un)" --env=HOME=/tmp'
RUNTIMES: dict[str, Runtime] = {
    "apptainer": _apptainer("apptainer"),
    "singularity": _apptainer("singularity"),
    "shifter": Runtime(("shifter",), "--volume=", "--workdir=", image="--image=", packages="", visible=("/",)),
    "podman-hpc": _docker("podman-hpc", (NVIDIA, "--gpu")),
    "charliecloud": Runtime(
        ("ch-run", "--home"), "--bind=", "--cd=", packages="/mnt/9", shell=("--", "sh", "-c"), visible=("/tmp",)
    ),
    "podman": _docker(
        "podman",
        *((NVIDIA, "--device=nvidia.com/gpu=all"), *DEVICES, (ROOTLESS, "--userns=keep-id")),
        more="--read-only-tmpfs=false",
    ),
    "docker": _docker("docker", (NVIDIA, "--gpus=all"), *DEVICES, more=f"--ulimit=memlock=-1 {USER}"),
}
PYXIS = Runtime((), "", "")


@dataclass(frozen=True)
class Container:
    """An image with its runtime.

    Args:
        folder: The working directory, also inside.
        packages: The folder with Lockstep's packages.
        mounts: More paths, as PATH[:INSIDE[:OPTIONS]].
    """

    image: str
    runtime: str
    folder: str
    packages: str
    mounts: tuple[str, ...] = ()

    def around(self, node: Sequence[str]) -> tuple[str, ...]:
        """Return the command that starts a node process in the image; with pyxis, srun does it."""
        runtime = RUNTIMES.get(self.runtime, PYXIS)
        packages = shlex.quote(runtime.packages or self.packages)
        path = f"{packages}/first"
        # Packages of the user's home come before those of the image, and belong to the machine's Python.
        python = f'PYTHONPATH={path}"${{PYTHONPATH:+:$PYTHONPATH}}" PYTHONNOUSERSITE="${{PYTHONNOUSERSITE-1}}"'
        inside = f"export {PACKAGES}={packages} {python}; exec {shlex.join(node)}"
        if runtime is PYXIS:
            return ("sh", "-c", inside)
        options = [f"{runtime.folder}{self.folder}", *(runtime.mount + mount for mount in self._mounts(runtime))]
        rest = shlex.join([*options, runtime.image + self.image, *runtime.shell, inside])
        where = "".join(f"! [ {test} ] || set -- {given} $@; " for test, given in runtime.where)
        start = " ".join(filter(None, [shlex.join(runtime.program), runtime.more, "$@" if where else "", rest]))
        # A node of a batch job may have no USER, which ch-run needs, and torch inside.
        own = f'unset {" ".join(OF_THE_MACHINE)}; export USER="${{USER:-$(id -un)}}"; '
        return ("sh", "-c", f"{own}{where}exec {start}")

    @property
    def slurm_options(self) -> tuple[str, ...]:
        """The options of srun that pyxis adds."""
        mounts = ",".join(self._mounts(PYXIS))
        image = (f"--container-image={self.image}", "--container-readonly")
        return (*image, f"--container-mounts={mounts}", f"--container-workdir={self.folder}")

    def _mounts(self, runtime: Runtime) -> list[str]:
        mounts = [*self.mounts, *([f"{self.packages}:{runtime.packages}"] if runtime.packages else [])]
        visible = [*runtime.visible, *(mount for mount in self.mounts if ":" not in mount)]
        if not any(Path(self.folder).is_relative_to(each) for each in visible):
            mounts.insert(0, self.folder)  # or it would hide a path that is made visible within it
        return [mount if ":" in mount else f"{mount}:{mount}" for mount in mounts]


def find_container(options: ContainerOptions, environment: Mapping[str, str], folder: str) -> Container | None:
    """Return the container that the options describe; None without an image.

    Args:
        folder: The working directory of the job.

    Raises:
        ConfigError: The image, a path or a runtime is missing.
    """
    if not options.container:
        return None
    image = options.container
    if image.startswith(("/", ".", "~")) or Path(image).suffix in IMAGE_FILES:
        image = str(Path(image).expanduser().absolute())
        if not Path(image).exists():
            raise ConfigError(f"--container {image}: no such file; give one, or a name as the runtime takes it")
    mounts = []
    for mount in filter(None, options.bind_mount.split(",")):
        path, colon, inside = mount.partition(":")
        path = str(Path(path).expanduser().absolute())
        if not Path(path).exists():
            raise ConfigError(f"--bind-mount {mount}: {path} does not exist")
        mounts.append(f"{path}{colon}{inside}")
    runtime, own = options.container_runtime or _installed(environment), str(packages_folder(environment))
    for path in (folder, own):
        if "," in path or ":" in path:
            raise ConfigError(f"--container: {path} cannot be made visible in an image, because it contains , or :")
    return Container(image, runtime, folder, own, tuple(mounts))


def _installed(environment: Mapping[str, str]) -> str:
    for name, runtime in RUNTIMES.items():
        if shutil.which(runtime.program[0], path=environment.get("PATH")):
            return name
    programs = ", ".join(runtime.program[0] for runtime in RUNTIMES.values())
    raise ConfigError(f"--container: PATH has none of {programs}; load a module, or name it by --container-runtime")


@cache
def packages_folder_in(cache: Path) -> Path:
    """Return the folder in a cache for the versions that this process began with."""
    digest = hashlib.sha256()
    for path in _files(packages().values()):
        status = path.stat()
        digest.update(f"{path} {status.st_size} {status.st_mtime_ns}\n".encode())
    return cache / "lockstep" / f"packages-{digest.hexdigest()[:12]}"


def packages_folder(environment: Mapping[str, str]) -> Path:
    """Return the folder in the user's cache for these versions of the packages, by their files' sizes and times."""
    home = Path(environment.get("HOME") or "/nonexistent")
    return packages_folder_in(Path(environment.get("XDG_CACHE_HOME") or home / ".cache"))


def packages() -> dict[str, Path]:
    """Return the folders or files of the packages that are installed here, by name."""
    found = {name: importlib.util.find_spec(name) for name in (*OURS, *OTHERS)}
    paths = {name: Path(spec.origin) for name, spec in found.items() if spec and spec.origin}
    metadata = [each for path in sys.path for each in Path(path).glob(METADATA)]
    return {
        **{name: path.parent if path.name == "__init__.py" else path for name, path in paths.items()},
        **{each.name: each for each in metadata},
    }


def _files(sources: Iterable[Path]) -> list[Path]:
    files = [path for source in sources for path in ([source] if source.is_file() else source.rglob("*"))]
    return sorted(path for path in files if path.is_file() and "__pycache__" not in path.parts)
