"""`lockstep submit`: write a batch script, submit it, and follow its output."""

from __future__ import annotations

import os
import shlex
import sys
import time
from codecs import getincrementaldecoder
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from pathlib import Path
from typing import Annotated, Literal

from lockstep.cli.parse import parse
from lockstep.cli.run import split
from lockstep.cli.script import split_at_dashes
from lockstep.config.flags import Positional, arg
from lockstep.errors import ConfigError, LockstepError
from lockstep.files.output import say
from lockstep.launch.plan.batch_script import BatchJob, at_site, is_scaling_study, render, run_folder
from lockstep.launch.plan.hosts import names_of_this_machine
from lockstep.launch.plan.site_profiles import find_site
from lockstep.launch.submission import GONE, SCHEDULERS, JobState, SubmittedJob, check_here, log_of, remember, submit

SCRIPTS = Path("lockstep-jobs")
POLL_SECONDS = 5.0  # between questions to the scheduler, which serves all users
GONE_POLLS = 3  # in a row, until a job that the scheduler does not list counts as ended
LATE_SECONDS = 5.0  # after a job's end, for the end of its output to arrive by the file system
# Variables that sbatch prefers to the script's lines, by the typed flag; by "", those of lines that each job needs.
PREFERRED = {
    "": "ARRAY_INX ERROR JOB_NAME NO_REQUEUE OPEN_MODE OUTPUT SIGNAL WAIT",
    "--time": "TIMELIMIT",
    "--queue": "PARTITION",
    "--partition": "PARTITION",
    "--account": "ACCOUNT",
    "--gpus-per-node": "GPUS_PER_NODE GPUS",
}
SILENT_SECONDS = 600.0  # without an answer from the scheduler


@dataclass(frozen=True)
class SubmitCommand:
    """Write a batch script as `lockstep script` does, and submit it to Slurm, PBS or Flux.

    A scaling study becomes one job for each of its numbers of workers, with as many of the nodes as it needs.

    Examples:
        lockstep submit slurm --nodes 2 --gpus-per-node 4 -- python train.py
        lockstep submit pbs --follow -- lockstep train cifar10
    """

    system: Annotated[Positional[Literal["slurm", "pbs", "flux"]], arg(metavar="slurm|pbs|flux")]
    """Batch system."""
    job: BatchJob = field(default_factory=BatchJob)
    dependency: Annotated[str | None, arg(metavar="TYPE:ID")] = None
    """Start after another job, such as afterok:17."""
    site: Annotated[str | None, arg(metavar="NAME|FILE|none")] = None
    """Site profile. Default: the one that matches."""
    follow: bool = False
    """Print the job's output until it ends, and exit with its exit code."""
    dry_run: bool = False
    """Print the script and exit."""


def main(arguments: Sequence[str]) -> int:
    flags, command = split_at_dashes(arguments)
    wanted = parse(SubmitCommand, "submit", flags)
    site = find_site(wanted.site, os.environ, names_of_this_machine())
    jobs, records = [(wanted.job, command)], list[Path]()
    if is_scaling_study(command):
        sited = at_site(wanted.job, site)
        layout = replace(wanted.job, workers=sited.workers, gpus_per_node=sited.gpus_per_node)
        jobs, records = _by_size(layout, command)
    texts = [(job, words, render(wanted.system, job, words, site)) for job, words in jobs]
    if wanted.follow and len(texts) > 1:
        raise ConfigError(f"--follow follows one job, but this study has {len(texts)}; see `lockstep jobs`")
    if wanted.dry_run:
        print("\n".join(text for *_, text in texts), end="")
        return 0
    for flag in ("", *flags):
        for name in PREFERRED.get(flag.partition("=")[0].replace("_", "-"), "").split():
            os.environ.pop(f"SBATCH_{name}", None)
    submitted: list[SubmittedJob] = []
    for job, words, text in texts:
        try:
            submitted.append(_submit(wanted, job, words, text))
        except ConfigError as error:
            ids = " ".join(each.id for each in submitted)
            more = f"; submitted before: {ids} (to end them: lockstep jobs --cancel {ids})" if submitted else ""
            raise ConfigError(f"{error}{more}") from None
    if records:
        print(f"when all have ended: lockstep report {shlex.join(map(str, records))}")
    return follow(submitted[0]) if wanted.follow else 0


def _by_size(job: BatchJob, command: Sequence[str]) -> tuple[list[tuple[BatchJob, Sequence[str]]], list[Path]]:
    """Return the jobs of a scaling study, one for each number of workers, and the file of each one's records."""
    from lockstep.cli.study import parse_counts
    from lockstep.cli.study.scaling import ScalingCommand

    at = command.index("scaling") + 1
    own, program = split(command[at:])
    study = parse(ScalingCommand, "study scaling", own)
    jobs: list[tuple[BatchJob, Sequence[str]]] = []
    records = []
    for workers in dict.fromkeys(parse_counts("-np", study.workers)):
        nodes = ceil(workers / job.per_node)
        if nodes > job.nodes:
            raise ConfigError(
                f"-np {workers} of the study needs {nodes} nodes with {job.per_node} workers each, but --nodes is "
                f"{job.nodes}; raise it, or --gpus-per-node or -np of `lockstep submit`"
            )
        part = replace(job, nodes=nodes, workers=nodes * job.per_node, name=f"{job.name}-{workers}")
        out = study.out.with_stem(f"{study.out.stem}-{workers}")
        words = [*command[:at], *own, "-np", str(workers), "--out", str(out)]
        jobs.append((part, [*words, "--", *program]))
        records.append(out)
    return jobs, records


def _submit(wanted: SubmitCommand, job: BatchJob, command: Sequence[str], text: str) -> SubmittedJob:
    script = _write(job.name, text)
    number, cluster = submit(wanted.system, script, wanted.dependency)
    folder, run = Path.cwd(), run_folder(wanted.system, job, command, number)
    submitted = SubmittedJob(
        system=wanted.system,
        cluster=cluster,
        id=number,
        name=job.name,
        command=" ".join(command),
        folder=str(folder),
        script=str(folder / script),
        log=str(folder / log_of(wanted.system, job.name, number)),
        run=str(folder / run) if run else "",
        unix_time=time.time(),
    )
    remember(submitted)
    print(f"submitted job {number} ({job.name}): {script}, output in {Path(submitted.log).name}", flush=True)
    return submitted


def _write(name: str, text: str) -> Path:
    """Write the script into a new file of the folder of scripts."""
    try:
        SCRIPTS.mkdir(exist_ok=True)
        number = 1
        while True:
            try:
                with (SCRIPTS / f"{name}-{number}.sh").open("x", encoding="utf-8", errors="surrogateescape") as file:
                    file.write(text)
                return SCRIPTS / f"{name}-{number}.sh"
            except FileExistsError:
                number += 1
    except OSError as error:
        raise ConfigError(f"{SCRIPTS}/ cannot be written: {error.strerror}; change to another folder") from None


def follow(job: SubmittedJob) -> int:
    """Print a job's output until it has ended, and return its exit code.

    Raises:
        LockstepError: Its exit code is unknown, because the scheduler no longer knows it, or does not answer.
    """
    check_here(job)
    scheduler, log, shown, offset, unknown = SCHEDULERS[job.system], Path(job.log), "", 0, 0
    decoder, answered = getincrementaldecoder("utf-8")("replace"), time.monotonic()
    try:
        while True:
            try:
                state = scheduler.states([job.id]).get(job.id, JobState(GONE))
                answered = time.monotonic()
            except ConfigError as error:
                if time.monotonic() - answered > SILENT_SECONDS:
                    raise LockstepError(f"job {job.id}: its exit code is unknown: {error}") from None
                state = JobState("")
            unknown = unknown + 1 if state.word == GONE else 0
            if state.word in scheduler.waiting and (about := _waits(state)) != shown:
                say(f"lockstep: job {job.id} {about}")
                shown = about
            ended = state.word in scheduler.ended or unknown == GONE_POLLS
            until = time.monotonic() + (LATE_SECONDS if ended else POLL_SECONDS)
            while True:
                data = _read_from(log, offset)
                offset += len(data)
                sys.stdout.write(decoder.decode(data))
                sys.stdout.flush()
                if time.monotonic() >= until:
                    break
                time.sleep(0.5)
            if ended:
                break
    except KeyboardInterrupt:
        say(f"\nlockstep: job {job.id} goes on; to end it: lockstep jobs --cancel {job.id}")
        raise
    where = f"see {log}" if offset else f"no output has arrived in {log}"
    if state.code is None:
        raise LockstepError(f"job {job.id}: {state.word}; its exit code is unknown, {where}")
    say(f"lockstep: job {job.id}: {state.word}, exit code {state.code}" + ("" if offset else f"; {where}"))
    return state.code if state.code in range(256) else 1


def _waits(state: JobState) -> str:
    return f"is {state.word}" + (f" ({state.reason})" if state.reason not in ("", "None") else "")


def _read_from(path: Path, offset: int) -> bytes:
    """Return the rest of a file, which may not exist yet. Opening it again shows what another host has appended."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read()
    except OSError:
        return b""
