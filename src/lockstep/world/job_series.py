"""Identify the batch job of a process, and the series of restarts or requeues that its job belongs to.

| series | source |
|---|---|
| starts of one job's workers (`--max-restarts`) | LOCKSTEP_SNAPSHOTS, TORCHELASTIC_RESTART_COUNT |
| runs of a requeued Slurm job | SLURM_JOB_ID, SLURM_CLUSTER_NAME, SLURM_RESTART_COUNT (sbatch(1)) |

Members are numbered from 0. Other batch systems do not number the runs of a job.
"""

from __future__ import annotations

from collections.abc import Mapping

from lockstep.world.launcher_environment import RankInfo

BATCH_JOBS = (("Slurm", "SLURM_JOB_ID"), ("PBS", "PBS_JOBID"), ("LSF", "LSB_JOBID"), ("Cobalt", "COBALT_JOBID"))


def describe_batch_job(environment: Mapping[str, str]) -> str:
    """Return the environment's batch job, such as "Slurm job 17"; "" outside of one."""
    jobs = (f"{system} job {environment[name]}" for system, name in BATCH_JOBS if environment.get(name))
    return next(jobs, "")


def series_of(rank_info: RankInfo, environment: Mapping[str, str]) -> dict[str, int]:
    """Return the series that this process's job belongs to, with its number in each; see `files.folder_lock.Owner`."""
    series = {}
    if rank_info.snapshots is not None:
        series[f"starts of {rank_info.snapshots.name}"] = rank_info.restart
    if job := environment.get("SLURM_JOB_ID"):
        runs = environment.get("SLURM_RESTART_COUNT", "0")
        series[f"Slurm job {job} of {environment.get('SLURM_CLUSTER_NAME', '')}"] = int(runs) if runs.isdecimal() else 0
    return series
