"""Owners of run folders: their batch job, and which restarts and requeues follow which."""

from __future__ import annotations

from pathlib import Path

from lockstep.files.folder_lock import Owner
from lockstep.train.checkpoints.run_lock import describe_owner
from lockstep.world.launcher_environment import RankInfo


def _owner(rank_info: RankInfo, **environment: str) -> Owner:
    return describe_owner(rank_info, environment)


def test_the_batch_job_is_named() -> None:
    assert _owner(RankInfo(), SLURM_JOB_ID="17").job == "Slurm job 17"
    assert _owner(RankInfo(), PBS_JOBID="17.server").job == "PBS job 17.server"
    assert _owner(RankInfo(), LSB_JOBID="17").job == "LSF job 17"
    assert _owner(RankInfo()).job == ""


def test_a_requeued_slurm_job_follows_itself_and_nothing_else() -> None:
    first = _owner(RankInfo(), SLURM_JOB_ID="17", SLURM_CLUSTER_NAME="a")
    requeued = _owner(RankInfo(), SLURM_JOB_ID="17", SLURM_CLUSTER_NAME="a", SLURM_RESTART_COUNT="1")
    assert requeued.follows(first)
    assert not first.follows(requeued)
    assert not _owner(RankInfo(), SLURM_JOB_ID="17", SLURM_CLUSTER_NAME="a").follows(
        first
    )  # another step of the same job
    for other in ({"SLURM_JOB_ID": "18"}, {"SLURM_JOB_ID": "17", "SLURM_CLUSTER_NAME": "b"}):
        assert not _owner(RankInfo(), **other, SLURM_RESTART_COUNT="1").follows(first)


def test_restarted_workers_follow_those_of_their_own_job() -> None:
    first = _owner(RankInfo(snapshots=Path("/dev/shm/job-a"), restart=0))
    assert _owner(RankInfo(snapshots=Path("/dev/shm/job-a"), restart=1)).follows(first)
    assert not _owner(RankInfo(snapshots=Path("/dev/shm/job-b"), restart=1)).follows(first)
    assert not _owner(RankInfo(restart=1)).follows(first)  # torchrun's run ids may be those of another job
