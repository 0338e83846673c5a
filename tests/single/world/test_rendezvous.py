"""What goes wrong where workers meet; how it goes right is seen in tests/parallel/test_mpi.py and tests/cluster."""

from __future__ import annotations

from pathlib import Path

import pytest
from name_service import Know

from lockstep.errors import WorldError
from lockstep.hvd.engine.settings import Settings
from lockstep.world import rendezvous
from lockstep.world.launcher_environment import RankInfo
from lockstep.world.rendezvous import WORKERS_SECONDS, open_store, serve_store
from lockstep.world.world import connect

SECONDS = 0.5


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch, temporary_files: Path) -> None:  # workers of a host meet there
    names = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE")
    for name in (*names, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "PBS_NODEFILE"):
        monkeypatch.delenv(name, raising=False)


def _fails(rank_info: RankInfo, words: str, seconds: float = SECONDS) -> None:
    with pytest.raises(WorldError, match=words):
        open_store(rank_info, seconds)


def test_a_worker_does_not_join_another_jobs_store(monkeypatch: pytest.MonkeyPatch) -> None:
    _store, port = serve_store()
    monkeypatch.setenv("MASTER_PORT", str(port))
    _fails(RankInfo(1, 2, 1, 2, 0, "MPICH"), rf"worker 1 on .* at 127.0.0.1:{port} .*another job listens there", 3.0)


def test_a_port_in_use_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    _store, port = serve_store()
    monkeypatch.setenv("MASTER_PORT", str(port))
    _fails(RankInfo(0, 2, 0, 2, 0, "MPICH"), rf"port {port} of .* \(MASTER_PORT\) is in use; set MASTER_PORT")


@pytest.mark.parametrize("has_port", [False, True])
def test_rank_0_names_missing_workers(has_port: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if has_port:
        store, free = serve_store()
        del store
        monkeypatch.setenv("MASTER_PORT", str(free))
    late = r"rank 1, 2 did not connect; if they are still starting \(load [\d.]+ on \d+ cores\), raise HOROVOD_START"
    _fails(RankInfo(0, 3, 0, 3, 0, "MPICH"), rf"worker 0 on .* within 0.5 s: {late}")


def test_one_variable_sets_the_wait_of_hvd_and_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Settings.from_environment({}).start_timeout_seconds == WORKERS_SECONDS == 600.0
    assert Settings.from_environment({"HOROVOD_START_TIMEOUT": "0.5"}).start_timeout_seconds == 0.5
    monkeypatch.setenv("HOROVOD_START_TIMEOUT", "0.5")
    rank_info = RankInfo(0, 2, 0, 2, 0, "MPICH")
    with pytest.raises(WorldError, match=r"within 0.5 s: rank 1 did not connect"), connect(rank_info, "cpu"):
        pass


def test_rank_0_reports_that_the_others_look_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_STEP_NODELIST", "192.0.2.1")
    _fails(RankInfo(0, 2, 0, 1, 0, "Slurm"), r"rank 0 runs on .*, but Slurm's .* to 192.0.2.1; set MASTER_ADDR=")


def test_worker_waiting_in_vain_reports_where_it_looked(monkeypatch: pytest.MonkeyPatch, names: Know) -> None:
    _store, free = serve_store()
    del _store
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.2")
    monkeypatch.setenv("MASTER_PORT", str(free))
    monkeypatch.setattr(rendezvous, "listening_address", lambda host: "127.0.0.2")
    _fails(
        RankInfo(0, 2, 0, 1, 0, "MPICH"),
        rf"rank 1 did not connect; rank 0 listens on 127.0.0.2 of .*, port {free}: set MASTER_ADDR",
    )
    names({"node1": "192.0.2.1"})
    monkeypatch.setenv("MASTER_ADDR", "node1")
    _fails(RankInfo(1, 2, 0, 1, 1, "MPICH"), r"node1 resolves to 192.0.2.1 on this host; set MASTER_ADDR")


def test_name_with_another_hosts_address_too_is_reported(monkeypatch: pytest.MonkeyPatch, names: Know) -> None:
    names({"node1": "127.0.1.1 192.0.2.1"})
    monkeypatch.setenv("MASTER_ADDR", "node1")
    _fails(
        RankInfo(0, 2, 0, 1, 0, "MPICH"),
        r"node1 resolves to 192.0.2.1 on .*, which is not an address of that host; set MASTER",
    )


@pytest.mark.parametrize("kind", ["link", "others may write", "file"])
def test_the_meeting_place_of_one_host_is_the_users_own(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = rendezvous._meeting_file().parent
    folder.rmdir()
    if kind == "link":
        folder.symlink_to(tmp_path)
    elif kind == "file":
        folder.touch()
    else:
        folder.mkdir()
        folder.chmod(0o770)
    _fails(RankInfo(0, 2, 0, 2, 0, "MPICH"), rf"{folder} is not a folder .*; remove it, or set TMPDIR")


def test_worker_waiting_in_vain_for_the_file_reports_it() -> None:
    _fails(RankInfo(1, 2, 1, 2, 0, "MPICH"), r"within 0.5 s: rank 0 did not write .*")


def test_error_asks_for_rank_0s_output_if_there_is_none() -> None:
    _fails(RankInfo(1, 2, 0, 1, 1, "MPICH"), r"MPICH does not set rank 0's address; set MASTER_ADDR")
