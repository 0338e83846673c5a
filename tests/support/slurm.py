"""A Slurm cluster on this machine: a login host with the controller, and nodes, each in separate namespaces.

A host is a set of Linux namespaces for its network (one address), host name, mounts and processes; it shares the files
of this machine. The cluster writes to one folder only. The first process of each host exits when this process closes
its standard input or dies; all processes and network links of the host end with it.

Real programs: munged, slurmctld, slurmd, sinfo (Debian: slurm-wlm, munge), unshare, nsenter, ip (util-linux, iproute2).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from time_limits import extended, wait_until

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "sinfo", "unshare", "nsenter", "ip")
LOGIN = "login"
NODES = ("hal01", "hal02")
NETWORK = "10.77.0"

# Set up a host: host name, a separate FOLDER/run, the names of all hosts, no name server; it exits when stdin closes.
INIT = """
set -e
hostname "$1"
mount --bind "$2/$1" "$2/run"
mount --bind "$2/hosts" /etc/hosts
mount --bind "$2/resolv.conf" /etc/resolv.conf
ip link set lo up
exec cat
"""

# More CPUs than this machine has (config_overrides), so that jobs need not wait; memory is no resource here.
CONFIGURATION = """
ClusterName=bed
SlurmctldHost=login({network}.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/run/munge.socket
CredType=cred/munge
CommunicationParameters=NoInAddrAny
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/run/slurmctld.pid
SlurmdPidFile={folder}/run/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
MpiDefault=none
LaunchParameters=use_interactive_step
SchedulerParameters=sched_interval=1,bf_interval=1,sched_min_interval=0
SlurmdTimeout=30
KillWait=5
MessageTimeout=20
SlurmdParameters=config_overrides
ReturnToService=2
NodeName={nodes} CPUs={cpus} State=UNKNOWN
PartitionName=work Nodes={nodes} Default=YES MaxTime=INFINITE State=UP PriorityTier=1
PartitionName=urgent Nodes={nodes} MaxTime=INFINITE State=UP PriorityTier=2
"""


def why_not() -> str:
    """Return why this machine cannot run a cluster, or an empty string."""
    if missing := [program for program in PROGRAMS if shutil.which(program, path=_path()) is None]:
        return f"needs {', '.join(missing)} (Debian: slurm-wlm munge iproute2 util-linux)"
    if os.geteuid() != 0:
        return "needs root, for network namespaces"
    tried = subprocess.run(
        ["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "ip", "link", "add", "br0", "type", "bridge"],
        capture_output=True,
        text=True,
        check=False,
    )
    return f"needs namespaces and a bridge: {tried.stderr.strip()}" if tried.returncode else ""


@dataclass(frozen=True)
class Slurm:
    """A running cluster; commands run on its login host unless another is named.

    `urgent` is a partition whose jobs preempt (and requeue) those of `work`, the default one, at once.
    """

    folder: Path
    hosts: dict[str, int]  # name: process ID of the first process, as seen here
    nodes: tuple[str, ...] = NODES
    cpus: int = 8  # per node

    def command(self, words: Sequence[str], host: str = LOGIN) -> list[str]:
        """Return the command line that runs `words` on a host, in this process's working directory."""
        enter = ["nsenter", "--target", str(self.hosts[host]), "--net", "--uts", "--mount", "--pid"]
        return [*enter, f"--wd={os.getcwd()}", "--", *words]

    def environment(self, **variables: str) -> dict[str, str]:
        """Return this environment with `variables` and the cluster's configuration, without other launchers'."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "OMPI", "PMI"))}
        return {**kept, "PATH": _path(), "SLURM_CONF": f"{self.folder}/slurm.conf", **variables}

    def run(
        self, words: Sequence[str], host: str = LOGIN, check: bool = True, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a host; return its output and exit code, which must be 0 if `check`."""
        pipe, line = subprocess.PIPE, self.command(words, host)
        streams = {"stdin": subprocess.DEVNULL, "stdout": pipe, "stderr": pipe}
        with subprocess.Popen(line, env=self.environment(**variables), text=True, **streams) as process:
            try:
                out, err = extended(lambda seconds: process.communicate(timeout=seconds))
            except subprocess.TimeoutExpired:
                process.kill()
                raise
        assert not check or process.returncode == 0, f"{' '.join(words)}: {process.returncode}\n{out}{err}"
        return subprocess.CompletedProcess(line, process.returncode, out, err)

    def sbatch(self, script: str, *options: str, check: bool = True, **variables: str) -> str:
        """Submit the text of a batch script, wait for it, and return its output."""
        file = self.folder / f"job-{time.monotonic_ns()}.sh"
        file.write_text(script)
        output = file.with_suffix(".out")
        words = ["sbatch", "--parsable", f"--output={output}", *options, str(file)]
        job = self.run(words, **variables).stdout.strip()
        state = self.wait_for_end(job)
        assert not check or state == "COMPLETED", f"{state}\n{output.read_text()}"
        return output.read_text()

    def facts(self, job: str) -> dict[str, str]:
        """Return what Slurm shows of a job."""
        words = self.run(["scontrol", "--oneliner", "show", "job", job]).stdout.split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_for_end(self, job: str) -> str:
        """Wait for a batch job and return its final state. (`sbatch --wait` polls less and less often.)"""
        going_on = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED", "SUSPENDED")
        wait_until(lambda: self.facts(job)["JobState"] not in going_on, explain=lambda: self.facts(job), pause=0.2)
        return self.facts(job)["JobState"]

    def wait_until_idle(self) -> None:
        """Wait until all nodes are up and idle."""
        show = ["sinfo", "--noheader", "--Node", "--partition=work", "--format=%N %T"]
        idle = [word for node in self.nodes for word in (node, "idle")]

        def is_idle() -> bool:
            return self.run(show, check=False).stdout.split() == idle

        wait_until(is_idle, explain=lambda: _tails(self.folder), pause=0.2)


@contextmanager
def slurm_cluster(folder: Path) -> Iterator[Slurm]:
    """Run a cluster for the duration of the context; `folder` must be empty and keeps its logs."""
    with ExitStack() as stack:
        daemons: list[subprocess.Popen[bytes]] = []
        stack.callback(lambda: [daemon.wait() for daemon in daemons])
        names = (LOGIN, *NODES)
        (folder / "run").mkdir()
        (folder / "state").mkdir()
        (folder / "munge.key").write_bytes(os.urandom(128))
        (folder / "munge.key").chmod(0o600)
        lines = [f"{NETWORK}.{number} {name}" for number, name in enumerate(names, 1)]
        (folder / "resolv.conf").write_text("nameserver 127.0.0.1\n")  # refuses connections at once
        (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *lines]) + "\n")
        for name in names:
            (folder / name).mkdir()
        slurm = Slurm(folder, {name: stack.enter_context(_host(folder, name)) for name in names})
        facts = {"folder": folder, "network": NETWORK, "nodes": ",".join(NODES), "cpus": slurm.cpus}
        (folder / "slurm.conf").write_text(CONFIGURATION.format(**facts))
        _connect_hosts(slurm)
        daemons += [_start(slurm, name, "munged", *_munge_options(folder)) for name in names]
        sockets = [folder / name / "munge.socket" for name in names]
        wait_until(lambda: all(socket.exists() for socket in sockets), explain=lambda: _tails(folder))
        daemons.append(_start(slurm, LOGIN, "slurmctld", "-D"))
        daemons += [_start(slurm, name, "slurmd", "-D", "-N", name) for name in NODES]
        slurm.wait_until_idle()
        yield slurm


@contextmanager
def _host(folder: Path, name: str) -> Iterator[int]:
    """Start a host; return the process ID of its first process, a grandchild of this process."""
    own = ["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    with subprocess.Popen(
        [*own, "sh", "-c", INIT, "sh", name, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"\n")  # echoed when the host is set up
        process.stdin.flush()
        try:
            assert process.stdout.read(1) == b"\n", f"{name}: no namespaces"
            yield int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text())
        finally:
            process.stdin.close()


def _connect_hosts(slurm: Slurm) -> None:
    """Create a bridge on the login host, with one port per host."""

    def ip(host: str, words: str) -> None:
        slurm.run(["ip", *words.split()], host)

    ip(LOGIN, "link add lan type bridge")
    ip(LOGIN, f"addr add {NETWORK}.1/24 dev lan")
    ip(LOGIN, "link set lan up")
    for number, node in enumerate(slurm.nodes, 2):
        pair = f"ip link add {node} type veth peer name eth0 netns {slurm.hosts[node]}"
        # Enter only the login host's network namespace: in its process namespace, the node's process ID is invalid.
        subprocess.run(["nsenter", "--target", str(slurm.hosts[LOGIN]), "--net", *pair.split()], check=True)
        ip(LOGIN, f"link set {node} master lan up")
        ip(node, f"addr add {NETWORK}.{number}/24 dev eth0")
        ip(node, "link set eth0 up")


def _munge_options(folder: Path) -> list[str]:
    run = folder / "run"
    files = {"key": folder / "munge.key", "socket": run / "munge.socket", "log": run / "munge.log"}
    files |= {"pid": run / "munge.pid", "seed": run / "munge.seed"}
    words = [f"--{name}={path}" if name == "socket" else f"--{name}-file={path}" for name, path in files.items()]
    return ["--foreground", "--force", *words]


def _start(slurm: Slurm, host: str, *words: str) -> subprocess.Popen[bytes]:
    """Start a daemon on a host; it ends with the host's namespaces."""
    with (slurm.folder / f"{words[0]}-{host}.out").open("w") as log:
        return subprocess.Popen(
            slurm.command(words, host), env=slurm.environment(), stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )


def _tails(folder: Path) -> str:
    logs = sorted([*folder.glob("*.log"), *folder.glob("*.out")])
    return "".join(f"\n== {log.name}\n" + "\n".join(log.read_text().splitlines()[-15:]) for log in logs)


def _path() -> str:
    return f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
