"""Batch scripts for Slurm, PBS, LSF and Flux that start a job with `lockstep run`, which detects the allocation.

The script runs the launcher in the background and waits for it, so that it can forward signals. Before the time limit
and at preemption, the launcher receives a signal, all workers stop after the same step with a checkpoint, and the exit
code 75 (EX_TEMPFAIL of sysexits.h) means that the job should be requeued. Sources: sbatch(1), the PBS Professional
User's Guide, IBM's reference of bsub, and flux-batch(1).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from operator import attrgetter
from pathlib import PurePath
from typing import Annotated, Literal

from lockstep.config.flags import arg, flags_of
from lockstep.config.run_paths import is_training, runs_subcommand
from lockstep.errors import ConfigError, StoppedError, plural, require
from lockstep.launch.plan.containers import ContainerOptions
from lockstep.launch.plan.site_profiles import SITE, Site
from lockstep.launch.staging.stage_options import StageOptions

System = Literal["slurm", "pbs", "lsf", "flux"]
SUBMIT = {"slurm": "sbatch FILE", "pbs": "qsub FILE", "lsf": "bsub < FILE", "flux": "flux batch FILE"}
PREFIX = {"slurm": "#SBATCH", "pbs": "#PBS", "lsf": "#BSUB", "flux": "#flux:"}
GPU_REQUEST = "--gres=gpu"
STOPPED = StoppedError.exit_code
DEFAULT_CPUS = 4  # per worker
LAUNCHERS = ("srun", "mpirun", "mpiexec", "horovodrun", "torchrun", "flux")
WHERE = {"-np", "--np", "-H", "--hosts", "--hostfile"}

WARNING_SECONDS = 120  # from the signal to the time limit; less in a job of less than 8 minutes
TIME = re.compile(r"(?:([0-9]+)-)?([0-9]+):([0-5][0-9]):([0-5][0-9])")
WORD = re.compile(r"[A-Za-z0-9][\w.+:@/,-]*", re.ASCII)

FORWARD = """\
# Forward signals to the launcher, which stops all workers after the same step, with a checkpoint.
launcher=
signals=
forward() {
    signals="$signals $1"
    kill -s "$1" $launcher 2>/dev/null
}
trap 'forward USR1' USR1
trap 'forward TERM' TERM
"""

# Bash runs a trap during `wait`, but not during a foreground command, and keeps the exit code for the next `wait`.
WAIT = """\
launcher=$!
for signal in $signals; do  # signals that arrived before the launcher's pid was known
    kill -s "$signal" "$launcher"
done

# `wait` returns when the launcher exits, but also when a signal arrives; wait again then.
while
    before=$signals
    wait "$launcher"
    code=$?
    [ "$signals" != "$before" ]
do :; done
"""


@dataclass(frozen=True)
class BatchJob:
    """A job's request to a batch system.

    Raises:
        ConfigError: A flag is invalid or contradicts another.
    """

    nodes: int = 1
    """Number of nodes."""
    workers: Annotated[int | None, arg(name="np", aliases=["-np"], metavar="N")] = None
    """Total number of workers. Default: one per GPU, or one per node."""
    gpus_per_node: Annotated[int, arg(metavar="G")] = 0
    """GPUs per node, one per worker."""
    cpus_per_worker: Annotated[int | None, arg(metavar="C")] = None
    """CPUs per worker. Default: the site's, else 4; those of a slot in LSF."""
    time: Annotated[str, arg(metavar="[D-]HH:MM:SS")] = "01:00:00"
    """Time limit."""
    name: str = "lockstep"
    """Name of the job and its output file."""
    account: str | None = None
    """Account; project in LSF, bank in Flux."""
    queue: Annotated[str | None, arg(aliases=["--partition"])] = None
    """Queue or partition."""
    setup: str = ""
    """Shell commands to run first, such as 'module load cuda'."""
    containers: ContainerOptions = field(default_factory=ContainerOptions)
    staging: StageOptions = field(default_factory=StageOptions)

    def __post_init__(self) -> None:
        for flag, number, least in (
            ("--nodes", self.nodes, 1),
            ("-np", self.workers, 1),
            ("--gpus-per-node", self.gpus_per_node, 0),
            ("--cpus-per-worker", self.cpus_per_worker, 1),
        ):
            require(number is None or number >= least, flag, number, f"at least {least}")
        for flag, word in (("--name", self.name), ("--account", self.account), ("--queue", self.queue)):
            is_valid = word is None or WORD.fullmatch(word) is not None
            require(is_valid, flag, repr(word), "one word of letters, digits and _.+:@/,-")
        require("/" not in self.name, "--name", self.name, "without /, as it also names the output file")
        require(self.seconds > 0, "--time", repr(self.time), "[D-]HH:MM:SS, such as 12:00:00 or 2-00:00:00")
        if self.workers is not None and self.workers % self.nodes:
            raise ConfigError(f"-np {self.workers} cannot be divided equally among {self.nodes} nodes")
        if self.gpus_per_node and self.per_node != self.gpus_per_node:
            here = f"{plural(self.per_node, 'worker')} and {plural(self.gpus_per_node, 'GPU')} per node"
            raise ConfigError(f"{here}, but a worker has one GPU; remove -np")

    @property
    def per_node(self) -> int:
        """Workers on each node."""
        if self.workers is not None:
            return self.workers // self.nodes
        return self.gpus_per_node or 1

    @property
    def seconds(self) -> int:
        """The time limit in seconds; 0 if it is malformed."""
        match = TIME.fullmatch(self.time)
        days, hours, minutes, seconds = (int(number or 0) for number in match.groups()) if match else (0, 0, 0, 0)
        return ((days * 24 + hours) * 60 + minutes) * 60 + seconds

    @property
    def warning_seconds(self) -> int:
        """How long before the time limit the job receives its signal to stop, in seconds."""
        return min(WARNING_SECONDS, ceil(self.seconds / 4))


OF_LAUNCHER = tuple(flag for flag in flags_of(BatchJob) if flag.group is not BatchJob)


def render(system: System, job: BatchJob, command: Sequence[str], site: Site | None = None) -> str:
    """Return the text of a script that runs `command` as a job of a batch system.

    Args:
        site: A profile whose allocation options and modules the script has; the job's own setup comes after them.

    Raises:
        ConfigError: The command is empty, starts workers itself, or determines where they run.
    """
    _check(command)
    parts = {"slurm": _slurm, "pbs": _pbs, "lsf": _lsf, "flux": _flux}
    job = at_site(job, site)
    if site and job.cpus_per_worker is None and system in ("slurm", "pbs") and job.per_node <= site.workers:
        job = replace(job, cpus_per_worker=site.cpus_per_worker or None)  # so that its lists are of the job's CPUs
    nodes, each = plural(job.nodes, "node"), plural(job.per_node, "worker")
    title = (
        "#!/bin/bash\n"
        f"# {nodes}, {each} on each. Written by `lockstep script {system}`; submit it with `{SUBMIT[system]}`.\n"
    )
    allocation = _allocation(PREFIX[system], site, counts_gpus=bool(job.gpus_per_node))
    return "\n".join([title, *allocation, *parts[system](job, command), 'exit "$code"\n'])


def at_site(job: BatchJob, site: Site | None) -> BatchJob:
    """Return the job with the site's GPUs per node, unless flags say otherwise, and its modules."""
    if site is None:
        return job
    given = job.gpus_per_node or job.workers
    if not given and site.workers:  # an allocation option of the site may already request the GPUs, with their type
        counted = any(option.startswith(GPU_REQUEST) for option in site.allocation)
        job = replace(job, workers=site.workers * job.nodes, gpus_per_node=0 if counted else site.workers)
    setup = [f"# {site.origin}", f"export {SITE}={shlex.quote(site.name)}", *site.modules, job.setup]
    return replace(job, setup="\n".join(setup).strip())


def _allocation(prefix: str, site: Site | None, counts_gpus: bool) -> list[str]:
    """Return the site's options; a number of GPUs from flags replaces the site's."""
    if site is None:
        return []
    options = [option for option in site.allocation if not (counts_gpus and option.startswith(GPU_REQUEST))]
    return _directives(prefix, options)


def _slurm(job: BatchJob, command: Sequence[str]) -> list[str]:
    options = [
        f"--job-name={job.name}",
        job.account and f"--account={job.account}",
        job.queue and f"--partition={job.queue}",
        f"--nodes={job.nodes}",
        f"--ntasks-per-node={job.per_node}",
        job.gpus_per_node and f"--gpus-per-node={job.gpus_per_node}",
        f"--cpus-per-task={job.cpus_per_worker or DEFAULT_CPUS}",
        f"--time={job.time}",
        "--output=%x-%j.out",
    ]
    return [
        *_directives(PREFIX["slurm"], options),
        "# Requeue the job after preemption, or on request below, with the same job ID, and append to its output.",
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
        f"# Send SIGUSR1 to this script {job.warning_seconds} seconds before the time limit.",
        f"#SBATCH --signal=B:USR1@{job.warning_seconds}",
        "",
        *_setup(job),
        FORWARD,
        *_run(job, command, _new_run_folder("slurm", job, "$SLURM_JOB_ID")),
        WAIT,
        f"# {STOPPED}: stopped after a checkpoint. Requeue the job unless it was cancelled and is no longer RUNNING.",
        f'if [ "$code" -eq {STOPPED} ]; then',
        '    state=$(squeue --all --noheader --format=%T --jobs="$SLURM_JOB_ID")',
        '    [ "$state" != RUNNING ] || scontrol requeue "$SLURM_JOB_ID"',
        "fi",
    ]


def _pbs(job: BatchJob, command: Sequence[str]) -> list[str]:
    cpus = job.cpus_per_worker or DEFAULT_CPUS
    chunk = f"select={job.nodes}:ncpus={job.per_node * cpus}:mpiprocs={job.per_node}:ompthreads={cpus}"
    minutes, seconds = divmod(job.seconds, 60)
    options = [
        f"-N {job.name}",
        job.account and f"-A {job.account}",
        job.queue and f"-q {job.queue}",
        f"-l {chunk}:ngpus={job.gpus_per_node}" if job.gpus_per_node else f"-l {chunk}",
        "-l place=scatter",
        f"-l walltime={minutes // 60:02}:{minutes % 60:02}:{seconds:02}",
        "-j oe",
    ]
    return [
        *_directives(PREFIX["pbs"], options),
        "# Let PBS restart the job, for example after a node failure.",
        "#PBS -r y",
        "",
        "# PBS starts jobs in the home directory.",
        'cd "$PBS_O_WORKDIR" || exit 1',
        "",
        *_setup(job),
        FORWARD,
        f"# PBS sends no signal at the time limit; `timeout` sends SIGUSR1 {job.warning_seconds} seconds earlier.",
        *_run(job, command, _new_run_folder("pbs", job), _timeout(job)),
        WAIT,
        f"# {STOPPED}: stopped after a checkpoint. A PBS job cannot requeue itself: submit this file again.",
    ]


def _lsf(job: BatchJob, command: Sequence[str]) -> list[str]:
    minutes, warning = ceil(job.seconds / 60), ceil(job.warning_seconds / 60)
    options = [
        f"-J {job.name}",
        job.account and f"-P {job.account}",
        job.queue and f"-q {job.queue}",
        f"-n {job.nodes * job.per_node}",
        f'-R "span[ptile={job.per_node}]"',
        job.cpus_per_worker and f'-R "affinity[core({job.cpus_per_worker})]"',
        job.gpus_per_node and f'-gpu "num={job.gpus_per_node}"',
        f"-W {minutes // 60}:{minutes % 60:02}",
        f"-o {job.name}-%J.out",
    ]
    return [
        *_directives(PREFIX["lsf"], options),
        f"# Send SIGUSR1 to this script {plural(warning, 'minute')} before the time limit.",
        f"#BSUB -wa USR1 -wt {warning}",
        f"# Requeue the job with the same job ID after exit code {STOPPED} or a node failure.",
        f'#BSUB -Q "{STOPPED}"',
        "#BSUB -r",
        "",
        *_setup(job),
        FORWARD,
        *_run(job, command, _new_run_folder("lsf", job, "$LSB_JOBID")),
        WAIT,
        f"# {STOPPED}: stopped after a checkpoint; LSF requeues the job, but must not after SIGTERM (`bkill`).",
        f'if [ "$code" -eq {STOPPED} ] && [[ $signals == *TERM* ]]; then',
        "    code=143",
        "fi",
    ]


def _flux(job: BatchJob, command: Sequence[str]) -> list[str]:
    if job.cpus_per_worker is not None:
        raise ConfigError("the nodes of a Flux job are its own, with all CPUs; remove --cpus-per-worker")
    options = [
        f"--job-name={job.name}",
        job.account and f"--bank={job.account}",
        job.queue and f"--queue={job.queue}",
        f"--nodes={job.nodes}",
        "--exclusive",
        f"--time-limit={job.seconds}s",
        f"--output={job.name}-{{{{id}}}}.out",
    ]
    return [
        *_directives(PREFIX["flux"], options),
        "",
        *_setup(job),
        FORWARD,
        f"hosts=$(flux hostlist --expand --delimiter=:{job.per_node}, instance):{job.per_node}",
        f"# `timeout` sends SIGUSR1 {job.warning_seconds} seconds before the time limit.",
        *_run(job, command, _new_run_folder("flux", job), _timeout(job), '-H "$hosts" '),
        WAIT,
        f"# {STOPPED}: stopped after a checkpoint. A Flux job cannot requeue itself: submit this file again.",
    ]


def _timeout(job: BatchJob) -> str:
    return f"timeout --foreground --preserve-status --signal=USR1 {job.seconds - job.warning_seconds} "


def _directives(prefix: str, options: Sequence[str | int | None]) -> list[str]:
    """Return one line per option; skip empty ones."""
    return [f"{prefix} {option}" for option in options if option]


def _setup(job: BatchJob) -> list[str]:
    if job.setup.strip():
        return [*job.setup.strip().splitlines(), ""]
    return ["# Add commands here that make `lockstep` available, such as: source venv/bin/activate", ""]


def _run(job: BatchJob, command: Sequence[str], folder: str, before: str = "", where: str = "") -> list[str]:
    """Return the lines that start the launcher in the background; a restarted training resumes from its checkpoint."""
    text, given = shlex.join(command), _flags(command)
    options = {flag.names[0]: attrgetter(".".join(flag.path))(job) for flag in OF_LAUNCHER}
    where += "".join(f"{name} {shlex.quote(value)} " for name, value in options.items() if value)
    if not is_training(command):
        comment = "# If the job is restarted, the command must itself resume from its newest checkpoint."
    elif "--resume" in given:
        comment = "# If the job is restarted, the run resumes as --resume specifies."
    elif "--run-dir" in given:
        comment = "# --resume auto was added: a restarted job resumes from its newest checkpoint."
        text += " --resume auto"
    else:
        comment = "# --run-dir and --resume auto were added: a restarted job resumes this run, and no other."
        text += f' --run-dir "{folder}" --resume auto'
    if runs_subcommand(command, "study"):
        number = command.index("study") + 2
        start, rest = shlex.join(command[:number]), shlex.join(command[number:])
        return ["# The study starts its own workers.", f"{before}{start} {where}\\", f"    {rest} &"]
    return [comment, f"{before}lockstep run {where}-- \\", f"    {text} &"]


def _check(command: Sequence[str]) -> None:
    if not command or not command[0]:
        example = "lockstep script slurm --nodes 2 -- lockstep train cifar10"
        raise ConfigError(f"missing COMMAND; add it after --, for example: {example}")
    first = PurePath(command[0]).name
    if runs_subcommand(command, "run"):
        first = "lockstep run"
    if first in (*LAUNCHERS, "lockstep run"):
        raise ConfigError(f"the script starts the command with `lockstep run`; remove {first}")
    flags = sorted(_flags(command) & {flag.names[0] for flag in OF_LAUNCHER})
    if flags and not runs_subcommand(command, "study"):
        raise ConfigError(f"the script starts the launcher of these flags; move {', '.join(flags)} before --")
    if is_training(command) and (flags := sorted(_flags(command) & WHERE)):
        raise ConfigError(f"the allocation determines where workers run; remove {', '.join(flags)} from the command")


def _new_run_folder(system: System, job: BatchJob, number: str = "") -> str:
    """Return the run folder of a training without --run-dir; only jobs that are requeued keep their number."""
    return f"runs/{job.name}-{number}" if system in ("slurm", "lsf") else f"runs/{job.name}"


def _flags(command: Sequence[str]) -> set[str]:
    return {argument.partition("=")[0].replace("_", "-") for argument in command if argument.startswith("-")}
