"""What schedulers say of jobs, by stand-ins for their programs, and the list of submitted jobs."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep.cli import main, submit
from lockstep.errors import ConfigError
from lockstep.launch.submission import GONE, SCHEDULERS, JobState, jobs_file, remembered

QSTAT = """Job Id: 17.server
    Job_Name = train
    job_state = Q
    comment = Not Running: Insufficient amount of resource: ngpus (R: 8 A:
\t 4 T: 16)

Job Id: 18.server
    job_state = F
    Exit_status = 75
Job Id: 19.server
    job_state = F
    Exit_status = 271
"""
SQUEUE = "17|PENDING|Resources\n18|FAILED|NonZeroExitCode\n20|RUNNING|None\n"
SCONTROL = "JobId=18 JobState=FAILED Restarts=0 ExitCode=75:0 RunTime=00:00:01"
CONFIG = "Configuration data as of 2026\nClusterName             = bed\n"
Programs = Callable[..., None]


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Programs:
    """Writes stand-ins, each of which notes its arguments in `words` and prints a text."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)

    def write(**texts: str) -> None:
        for name, text in texts.items():
            (tmp_path / "bin" / f"{name}.txt").write_text(text)
            program = tmp_path / "bin" / name
            program.write_text(f'#!/bin/sh\necho "{name} $*" >> {tmp_path}/words\ncat {program}.txt\n')
            program.chmod(0o755)

    return write


def test_slurm_names_states_reasons_and_exit_codes(programs: Programs) -> None:
    programs(squeue=SQUEUE, scontrol=SCONTROL, sacct="16|CANCELLED by 0|0:0\n")
    assert SCHEDULERS["slurm"].states(["16", "17", "18", "19"]) == {
        "16": JobState("CANCELLED", "", 143),
        "17": JobState("PENDING", "Resources"),
        "18": JobState("FAILED", "", 75),
    }


@pytest.mark.parametrize(
    ("word", "shown", "code"),
    [
        ("COMPLETED", "0:0", 0),
        ("TIMEOUT", "0:0", 124),
        ("CANCELLED", "0:0", 143),
        ("NODE_FAIL", "0:0", 1),
        ("FAILED", "0:9", 137),
        ("SIGNALING", "0:0", None),
    ],
)
def test_slurms_zero_is_success_only_of_completed_jobs(
    word: str, shown: str, code: int | None, programs: Programs
) -> None:
    programs(squeue=f"17|{word}|None\n", scontrol=f"JobId=17 JobState={word} ExitCode={shown}", sacct="")
    state = SCHEDULERS["slurm"].states(["17"])["17"]
    assert (state.code, state.word in SCHEDULERS["slurm"].ended) == (code, code is not None)


def test_a_job_that_pbs_or_flux_ended_has_not_succeeded(programs: Programs) -> None:
    def block(job: int, *facts: str) -> str:
        return f"Job Id: {job}.server\n    job_state = F\n" + "".join(f"    {fact}\n" for fact in facts)

    programs(
        qstat=block(1, "Exit_status = -29")
        + block(2, "Exit_status = 0", "substate = 91")
        + block(3)
        + block(4, "x = 1"),
        flux="ƒ2P|CANCELED|-128\nƒ3Q|TIMEOUT|0\nƒ4R|COMPLETED|0\n",
    )
    states = SCHEDULERS["pbs"].states([f"{job}.server" for job in (1, 2, 3, 4)])
    assert [state.code for state in states.values()] == [1, 1, None, None]
    assert [state.code for state in SCHEDULERS["flux"].states(["ƒ2P", "ƒ3Q", "ƒ4R"]).values()] == [143, 1, 0]


def test_pbs_names_states_reasons_and_exit_codes(programs: Programs) -> None:
    programs(qstat=QSTAT)
    assert SCHEDULERS["pbs"].states(["17.server", "18.server", "19.server"]) == {
        "17.server": JobState("Q", "Not Running: Insufficient amount of resource: ngpus (R: 8 A: 4 T: 16)"),
        "18.server": JobState("F", "", 75),
        "19.server": JobState("F", "", 143),  # SIGTERM
    }


def test_a_failing_scheduler_is_not_one_without_jobs(programs: Programs, tmp_path: Path) -> None:
    programs(qstat=QSTAT.partition("Job Id: 18")[0])
    program = tmp_path / "bin" / "qstat"
    alive = program.read_text()
    program.write_text(f"{alive}echo 'qstat: Unknown Job Id 18.server' >&2\nexit 153\n")
    assert set(SCHEDULERS["pbs"].states(["17.server", "18.server"])) == {"17.server"}
    program.write_text("#!/bin/sh\necho 'qstat: cannot connect to server pbs (errno=15010)' >&2\nexit 255\n")
    with pytest.raises(ConfigError, match="qstat failed: qstat: cannot connect"):
        SCHEDULERS["pbs"].states(["17.server"])
    program.write_text(f"#!/bin/sh\n[ $1 != -x ] || {{ echo \"qstat: invalid option -- 'x'\" >&2; exit 2; }}\n{alive}")
    assert set(SCHEDULERS["pbs"].states(["17.server"])) == {"17.server"}, "an option that it lacks"
    program.write_text(f"#!/bin/sh\n[ $1 != -x ] || {{ echo '<Data><Job/></Data>'; exit 0; }}\n{alive}")
    assert set(SCHEDULERS["pbs"].states(["17.server"])) == {"17.server"}, "Torque's XML"
    program.write_text("#!/bin/sh\necho 'qstat: Unknown host pbs' >&2\nexit 1\n")
    with pytest.raises(ConfigError, match="Unknown host"):
        SCHEDULERS["pbs"].states(["17.server"])


def test_flux_names_states_and_exit_codes(programs: Programs) -> None:
    programs(flux="ƒ2P|SCHED|\nƒ3Q|FAILED|75\nƒ4R|CANCELED|-15\n")
    assert SCHEDULERS["flux"].states(["ƒ2P", "ƒ3Q", "ƒ4R"]) == {
        "ƒ2P": JobState("SCHED"),
        "ƒ3Q": JobState("FAILED", "", 75),
        "ƒ4R": JobState("CANCELED", "", 143),
    }


@pytest.mark.parametrize(
    ("system", "program", "printed", "words", "log"),
    [
        (
            "slurm",
            "sbatch",
            "17;bed\n",
            "sbatch --parsable --kill-on-invalid-dep=yes --dependency=afterok:3 ",
            "lockstep-17.out",
        ),
        ("pbs", "qsub", "17.server\n", "qsub -C #PBS -W depend=afterok:3 ", "lockstep.o17"),
        ("flux", "flux", "ƒ2P\n", "flux batch --dependency=afterok:3 ", "lockstep-ƒ2P.out"),
    ],
)
def test_a_job_is_submitted_and_remembered(
    system: str, program: str, printed: str, words: str, log: str, programs: Programs, tmp_path: Path
) -> None:
    programs(**{program: printed, "scontrol": CONFIG})
    for number in (1, 2):
        assert main(["submit", system, "--dependency", "afterok:3", "--", "lockstep", "train", "digits"]) == 0
        assert (tmp_path / "words").read_text().splitlines()[-1] == f"{words}lockstep-jobs/lockstep-{number}.sh"
    job = remembered(tmp_path)[-1]
    assert (job.system, job.id, job.log) == (system, printed.strip().split(";")[0], str(tmp_path / log))
    assert job.run == str(tmp_path / "runs" / ("lockstep-17" if system == "slurm" else "lockstep"))
    assert remembered(tmp_path / "elsewhere") == []


def test_variables_do_not_replace_typed_flags(programs: Programs, monkeypatch: pytest.MonkeyPatch) -> None:
    programs(sbatch="17\n", scontrol=CONFIG)
    names = "TIMELIMIT PARTITION ACCOUNT GPUS_PER_NODE GPUS QOS ARRAY_INX SIGNAL NO_REQUEUE OPEN_MODE OUTPUT ERROR WAIT"
    for flags, kept in (
        ([], "TIMELIMIT PARTITION ACCOUNT GPUS_PER_NODE GPUS QOS"),
        (["--time=01:00:00", "--queue", "a", "--gpus_per_node", "2"], "ACCOUNT QOS"),
        (["--partition=a", "--account=b"], "TIMELIMIT GPUS_PER_NODE GPUS QOS"),
    ):
        for name in names.split():
            monkeypatch.setenv(f"SBATCH_{name}", "1")
        assert main(["submit", "slurm", *flags, "--", "true"]) == 0
        assert [name for name in names.split() if f"SBATCH_{name}" in os.environ] == kept.split()


def test_a_damaged_list_of_jobs_keeps_what_is_whole(
    programs: Programs, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submit, "POLL_SECONDS", 0.0)
    monkeypatch.setattr(submit, "LATE_SECONDS", 0.0)
    programs(sbatch="17\n", squeue="", sacct="", scontrol=CONFIG)
    assert main(["submit", "slurm", "--", "true"]) == 0
    with jobs_file().open("a") as file:
        file.write('{"system": "slurm", "id": "18"}\n{"syst')
    capsys.readouterr()
    assert main(["jobs"]) == 0
    (row,) = capsys.readouterr().out.splitlines()[1:]
    assert row.split()[:3] == ["17", "lockstep", GONE]
    assert main(["jobs", "--follow", "17"]) == 1, "its exit code is unknown"


def test_nothing_is_submitted_that_cannot_run(
    programs: Programs, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    study = ["lockstep", "study", "scaling", "-np", "1,8", "--", "python", "train.py"]
    for words, reason in (
        (
            ["--gpus-per-node", "4", "--", *study],
            "-np 8 of the study needs 2 nodes with 4 workers each, but --nodes is 1",
        ),
        (["--nodes", "8", "--follow", "--", *study], "--follow follows one job, but this study has 2"),
        (["--", "srun", "python", "train.py"], "remove srun"),
        ([], "missing COMMAND"),
        (["--", "true"], "scontrol is not installed here"),
    ):
        assert main(["submit", "slurm", *words]) == 2
        assert reason in capsys.readouterr().err


def test_a_study_starts_its_own_workers(programs: Programs, capsys: pytest.CaptureFixture[str]) -> None:
    study = ["lockstep", "study", "scaling", "-np=8,2", "--out=a b.jsonl", "--", "python", "train.py"]
    assert main(["submit", "flux", "--nodes", "2", "--gpus-per-node", "4", "--dry-run", "--", *study]) == 0
    text = capsys.readouterr().out
    assert text.count('lockstep study scaling -H "$hosts" \\\n') == 2
    assert "#flux: --nodes=1\n" in text
    assert "-np=8,2 '--out=a b.jsonl' -np 2 --out 'a b-2.jsonl' -- python train.py &\n" in text
    assert "lockstep run" not in text


def test_a_job_of_another_cluster_is_neither_ended_nor_cancelled(
    programs: Programs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    programs(sbatch="17\n", squeue="17|RUNNING|None\n", scancel="", scontrol=CONFIG, qsub="9.server\n")
    assert main(["submit", "slurm", "--", "true"]) == main(["submit", "pbs", "--", "true"]) == 0
    programs(scontrol=CONFIG.replace("bed", "other"))
    (tmp_path / "bin" / "qsub").unlink()
    capsys.readouterr()
    assert main(["jobs"]) == 0
    rows = [row.split() for row in capsys.readouterr().out.splitlines()[1:]]
    assert [row[:4] for row in rows] == [["9.server", "lockstep", "elsewhere", "0"], ["17", "lockstep", "on", "bed"]]
    assert main(["jobs", "--cancel", "17"]) == 2
    assert "submitted to the cluster bed, and this is other; run this there" in capsys.readouterr().err
    assert "scancel" not in (tmp_path / "words").read_text()


def test_a_job_that_went_to_another_cluster_is_not_followed(
    programs: Programs, capsys: pytest.CaptureFixture[str]
) -> None:
    programs(sbatch="17;b\n", squeue="17|COMPLETED|None\n", scancel="", scontrol=CONFIG)
    assert main(["submit", "slurm", "--follow", "--", "true"]) == 2
    assert "job 17 was submitted to the cluster b, and this is bed" in capsys.readouterr().err


def test_all_jobs_are_cancelled_though_one_cannot_be(
    programs: Programs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in (17, 18):
        programs(qsub=f"{number}.server\n", qdel="")
        assert main(["submit", "pbs", "--", "true"]) == 0
    (tmp_path / "bin" / "qdel").write_text("#!/bin/sh\n[ $1 = 18.server ] || { echo Job has ended >&2; exit 35; }\n")
    capsys.readouterr()
    assert main(["jobs", "--cancel", "17", "18"]) == 2
    said = capsys.readouterr()
    assert (said.out, "job 17.server: qdel failed: Job has ended" in said.err) == ("cancelled job 18.server\n", True)


def test_a_job_is_not_lost_with_its_list(
    programs: Programs, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    programs(qsub="17.server\n")
    (tmp_path / "state").write_text("a file, where the folder should be")
    assert main(["submit", "pbs", "--", "true"]) == 0
    said = capsys.readouterr()
    assert "submitted job 17.server" in said.out
    assert "job 17.server cannot be remembered" in said.err
    programs(qsub="Welcome to the cluster\n")
    assert main(["submit", "pbs", "--", "true"]) == 2
    assert "printed 'Welcome to the cluster' instead of a job's id" in capsys.readouterr().err


def test_a_site_determines_the_nodes_of_a_study(programs: Programs, capsys: pytest.CaptureFixture[str]) -> None:
    study = ["lockstep", "study", "scaling", "-np", "4,4,8", "--", "python", "train.py"]
    assert main(["submit", "slurm", "--nodes", "2", "--site", "polaris", "--dry-run", "--", *study]) == 0
    text = capsys.readouterr().out
    assert [text.count(f"#SBATCH --nodes={nodes}\n") for nodes in (1, 2)] == [1, 1]
    assert text.count("#SBATCH --gpus-per-node=4\n") == 2
