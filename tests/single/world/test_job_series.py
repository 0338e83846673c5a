"""Which jobs follow which, by the variables that batch systems and our launcher set."""

from __future__ import annotations

from pathlib import Path

from lockstep.files.folder_lock import Owner
from lockstep.world.job_series import describe_batch_job, series_of
from lockstep.world.launcher_environment import RankInfo


def _owner(rank_info: RankInfo, **environment: str) -> Owner:
    return Owner("lockstep train", describe_batch_job(environment), series_of(rank_info, environment))


def test_the_batch_job_is_named() -> None:
    assert describe_batch_job({"SLURM_JOB_ID": "17"}) == "Slurm job 17"
    assert describe_batch_job({"PBS_JOBID": "17.server"}) == "PBS job 17.server"
    assert describe_batch_job({"LSB_JOBID": "17"}) == "LSF job 17"
    assert describe_batch_job({}) == ""


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
