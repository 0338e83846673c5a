"""The variables of workers: those that the launcher's environment hands on, and those with a worker's rank info.

A node process sets them; the plan of a job shows them. Nothing here needs more of a plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lockstep.diagnosis import FOLDER as PROGRESS
from lockstep.diagnosis import NODE, OBSERVE, OBSERVE_STARTED
from lockstep.files.staged import STAGED
from lockstep.world import LOSS, NODE_PROCESS, SNAPSHOTS, STARTED
from lockstep.world.accelerator import VISIBLE

TORCHRUNS = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_NAME"),
    *("ROLE_RANK", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE"),
)
RANK_INFO = (
    *(*TORCHRUNS, SNAPSHOTS, NODE, NODE_PROCESS, LOSS, STARTED),
    *(f"HOROVOD_{part}{what}" for part in ("", "LOCAL_", "CROSS_") for what in ("RANK", "SIZE")),
)
# If set, manually started nodes identify each other by this secret; for other jobs the launcher chooses one.
SECRET = "LOCKSTEP_JOB_SECRET"
# Variables that describe one host or a session on it, and would be wrong on other hosts.
OF_THE_HOST = (
    *("HOME", "HOSTNAME", "LOGNAME", "MAIL", "PWD", "OLDPWD", "SHELL", "SHLVL", "TERM", "TMPDIR", "USER"),
    *("DISPLAY", "_"),
    *VISIBLE,
    *("GPU_DEVICE_ORDINAL", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "SLURMD_NODENAME", "SLURM_TASK_PID"),
)
# Variables that describe programs of this machine, and would be wrong for those of an image.
OF_THE_MACHINE = (
    *("LD_PRELOAD", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHOME", "PYTHONUSERBASE", "VIRTUAL_ENV", "TMPDIR"),
    *("CONDA_PREFIX", "CONDA_DEFAULT_ENV", "CONDA_EXE", "CONDA_SHLVL"),
)
OF_THE_IMAGE = (*OF_THE_MACHINE, "PATH", "HOME", "SHELL")  # instead of this machine's
OF_THE_SESSION = ("BASH_FUNC_", "SSH_", "XDG_", "DBUS_", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID")


def threads(cores: int, workers: int) -> int:
    """Return the threads per worker, so that the workers of a host have no more threads than cores."""
    return max(1, cores // workers)


def torchrun_variables(
    node: int, local_rank: int, slots: Sequence[int], address: str, port: int | str
) -> dict[str, str]:
    """Return the variables in which torchrun passes rank info to a worker.

    Args:
        slots: Workers on each node.
        address: The address of the job's store, at `port`.
    """
    rank, size = str(sum(slots[:node]) + local_rank), str(sum(slots))
    return {
        "RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(slots[node]),
        "GROUP_RANK": str(node),
        "GROUP_WORLD_SIZE": str(len(slots)),
        "ROLE_NAME": "worker",
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": size,
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def horovod_variables(worker: Mapping[str, str], slots: Sequence[int]) -> dict[str, str]:
    """Return Horovod's variables for a worker with these torchrun variables.

    The cross rank and size count the nodes that have a worker with its local rank.

    Args:
        slots: Workers on each node.
    """
    having = [node for node, count in enumerate(slots) if count > int(worker["LOCAL_RANK"])]
    return {
        "HOROVOD_RANK": worker["RANK"],
        "HOROVOD_SIZE": worker["WORLD_SIZE"],
        "HOROVOD_LOCAL_RANK": worker["LOCAL_RANK"],
        "HOROVOD_LOCAL_SIZE": worker["LOCAL_WORLD_SIZE"],
        "HOROVOD_CROSS_RANK": str(having.index(int(worker["GROUP_RANK"]))),
        "HOROVOD_CROSS_SIZE": str(len(having)),
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": worker["MASTER_ADDR"],
        "HOROVOD_GLOO_RENDEZVOUS_PORT": worker["MASTER_PORT"],
    }


def of_horovodrun(variables: Mapping[str, str], node: int) -> dict[str, str]:
    """Return a worker's variables without torchrun's, which Horovod does not set.

    Libraries in scripts for Horovod, such as Accelerate and Hugging Face's trainer, would see a job of torchrun's: they
    would divide the samples among the workers a second time, and average the gradients themselves.
    """
    return {name: value for name, value in variables.items() if name not in TORCHRUNS} | {NODE: str(node)}


def handed_on(environment: Mapping[str, str], elsewhere: bool = False, into_image: bool = False) -> dict[str, str]:
    """Return the part of the launcher's environment that its workers inherit.

    It excludes SECRET and OBSERVE, which only the launcher needs, and OBSERVE_STARTED, PROGRESS, STAGED and RANK_INFO,
    which are the launcher's own if it is a worker of another job. On this host, CUDA_VISIBLE_DEVICES and exported shell
    functions are inherited. (Horovod drops them, because other hosts have other devices and shells.)

    Args:
        elsewhere: For workers on another host, without variables that describe this host.
        into_image: For workers in a container, without variables that describe this host's programs.
    """
    dropped = {"HOROVOD_ELASTIC", SECRET, OBSERVE, OBSERVE_STARTED, PROGRESS, STAGED, *RANK_INFO}
    dropped |= {*(OF_THE_HOST if elsewhere else ()), *(OF_THE_IMAGE if into_image else ())}
    prefixes = OF_THE_SESSION if elsewhere or into_image else ()
    return {name: environment[name] for name in environment if not name.startswith(prefixes) and name not in dropped}
