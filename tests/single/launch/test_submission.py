"""Submission of jobs and their states, with stand-ins for the schedulers' programs."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep.cli import main, submit
from lockstep.errors import ConfigError
from lockstep.launch.submission import JobState, SubmittedJob

Programs = Callable[..., None]


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Programs:
    """Writes stand-ins, each of which notes its arguments in `words` and prints a text."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    monkeypatch.setattr(submit, "POLL_SECONDS", 0.0)
    monkeypatch.setattr(submit, "LATE_SECONDS", 0.0)
    monkeypatch.chdir(tmp_path)

    def write(**texts: str) -> None:
        for name, text in texts.items():
            (tmp_path / "bin" / f"{name}.txt").write_text(text)
            program = tmp_path / "bin" / name
            program.write_text(f'#!/bin/sh\necho "{name} $*" >> {tmp_path}/words\ncat {program}.txt\n')
            program.chmod(0o755)

    return write


def state_of(system: str, job: str = "17") -> JobState | None:
    return SubmittedJob(system, job, Path("log")).state()


@pytest.mark.parametrize(
    ("word", "shown", "code"),
    [
        ("COMPLETED", "0:0", 0),
        ("TIMEOUT", "0:0", 124),
        ("CANCELLED", "0:0", 143),
        ("NODE_FAIL", "0:0", 1),
        ("FAILED", "75:0", 75),
        ("FAILED", "0:9", 137),
        ("PENDING", "0:0", None),
        ("SIGNALING", "0:0", None),
    ],
)
def test_slurms_zero_is_success_only_of_completed_jobs(
    word: str, shown: str, code: int | None, programs: Programs
) -> None:
    programs(scontrol=f"JobId=17 JobName=x JobState={word} Reason=None ExitCode={shown} RunTime=00:00:01")
    state = state_of("slurm")
    assert state == JobState(word, code)
    assert SubmittedJob("slurm", "17", Path("log")).has_ended(state) == (code is not None)


@pytest.mark.parametrize(
    ("facts", "state"),
    [
        (["job_state = Q", "comment = Not Running: Insufficient (A:\n\t 4)"], JobState("Q")),
        (["job_state = F", "Exit_status = 75"], JobState("F", 75)),
        (["job_state = F", "Exit_status = 271"], JobState("F", 143)),  # SIGTERM
        (["job_state = F", "Exit_status = -29"], JobState("F", 1)),
        (["job_state = F", "Exit_status = 0", "substate = 91"], JobState("F", 1)),
        (["job_state = F", "Exit_status = 0", "substate = 92"], JobState("F", 0)),
        (["job_state = F"], JobState("F")),
        ([], None),
    ],
)
def test_pbs_job_has_succeeded_only_if_it_was_not_ended(
    facts: list[str], state: JobState | None, programs: Programs
) -> None:
    programs(qstat="Job Id: 17.server\n" + "".join(f"    {fact}\n" for fact in facts))
    assert state_of("pbs", "17.server") == state


@pytest.mark.parametrize(
    ("printed", "state"),
    [
        ("SCHED|", JobState("SCHED")),
        ("COMPLETED|0", JobState("COMPLETED", 0)),
        ("FAILED|75", JobState("FAILED", 75)),
        ("TIMEOUT|0", JobState("TIMEOUT", 1)),
        ("CANCELED|-15", JobState("CANCELED", 143)),
        ("CANCELED|-128", JobState("CANCELED", 143)),
        ("", None),
    ],
)
def test_flux_job_has_succeeded_only_if_completed(printed: str, state: JobState | None, programs: Programs) -> None:
    programs(flux=f"{printed}\n")
    assert state_of("flux", "ƒ2P") == state


def test_a_failing_scheduler_is_not_one_without_jobs(programs: Programs, tmp_path: Path) -> None:
    programs(qstat="Job Id: 17.server\n    job_state = Q\n")
    program = tmp_path / "bin" / "qstat"
    alive = program.read_text()
    for script, state in (
        ("echo 'qstat: Unknown Job Id 17.server' >&2\nexit 153\n", None),
        (f"[ $1 != -x ] || {{ echo \"qstat: invalid option -- 'x'\" >&2; exit 2; }}\n{alive}", JobState("Q")),
        (f"[ $1 != -x ] || {{ echo '<Data><Job/></Data>'; exit 0; }}\n{alive}", JobState("Q")),  # Torque's XML
    ):
        program.write_text(f"#!/bin/sh\n{script}")
        assert state_of("pbs", "17.server") == state
    for message in ("qstat: cannot connect to server pbs (errno=15010)", "qstat: Unknown host pbs"):
        program.write_text(f"#!/bin/sh\necho '{message}' >&2\nexit 255\n")
        with pytest.raises(ConfigError, match=r"qstat failed: qstat: [cU]"):
            state_of("pbs", "17.server")


@pytest.mark.parametrize(
    ("system", "printed", "words", "follow"),
    [
        (
            "slurm",
            "17;bed\n",
            "sbatch --parsable --kill-on-invalid-dep=yes --dependency=afterok:3 ",
            "state: squeue --jobs=17 --clusters=bed; output: tail -F lockstep-17.out; "
            "to cancel it: scancel 17 --clusters=bed",
        ),
        (
            "pbs",
            "17.server\n",
            "qsub -C #PBS -W depend=afterok:3 ",
            "state: qstat 17.server; output: tail -F lockstep.o17; to cancel it: qdel 17.server",
        ),
        (
            "flux",
            "ƒ2P\n",
            "flux batch --dependency=afterok:3 ",
            "state: flux jobs ƒ2P; output: tail -F lockstep-ƒ2P.out; to cancel it: flux cancel ƒ2P",
        ),
    ],
)
def test_submit_prints_how_to_follow_and_cancel(
    system: str,
    printed: str,
    words: str,
    follow: str,
    programs: Programs,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    programs(**{words.split()[0]: printed})
    for number in (1, 2):
        assert main(["submit", system, "--dependency", "afterok:3", "--", "lockstep", "train", "digits"]) == 0
        script = f"lockstep-jobs/lockstep-{number}.sh"
        assert (tmp_path / "words").read_text().splitlines()[-1] == f"{words}{script}"
        id = printed.strip().split(";")[0]
        assert capsys.readouterr().out.replace("'", "") == f"submitted job {id} (lockstep): {script}\n{follow}\n"


@pytest.mark.parametrize(
    ("facts", "output", "code", "message"),
    [
        ("JobState=FAILED ExitCode=7:0", "é\n", 7, "lockstep: job 17: FAILED, exit code 7\n"),
        ("JobState=COMPLETED ExitCode=0:0", "", 0, "exit code 0; no output has arrived in lockstep-17.out"),
        ("", "é\n", 1, "job 17: ended; its exit code is unknown, see lockstep-17.out"),
    ],
)
def test_followed_job_prints_its_output_and_exit_code(
    facts: str,
    output: str,
    code: int,
    message: str,
    programs: Programs,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    programs(sbatch="17\n", scontrol=f"JobId=17 {facts}")
    if output:
        (tmp_path / "lockstep-17.out").write_text(output)
    assert main(["submit", "slurm", "--follow", "--", "true"]) == code
    printed = capsys.readouterr()
    assert printed.out.endswith(f"scancel 17\n{output}")
    assert message in printed.err


def test_variables_do_not_replace_typed_flags(programs: Programs, monkeypatch: pytest.MonkeyPatch) -> None:
    programs(sbatch="17\n")
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


def test_nothing_is_submitted_that_cannot_run(
    programs: Programs, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    programs(qsub="Welcome to the cluster\n")
    for words, reason in (
        (["slurm", "--", "srun", "python", "train.py"], "remove srun"),
        (["slurm"], "missing COMMAND"),
        (["flux", "--", "true"], "flux is not installed here"),
        (["pbs", "--", "true"], "qsub printed 'Welcome to the cluster' instead of a job's id; check the queue"),
    ):
        assert main(["submit", *words]) == 2
        assert reason in capsys.readouterr().err


def test_a_study_starts_its_own_workers(programs: Programs, capsys: pytest.CaptureFixture[str]) -> None:
    study = ["lockstep", "study", "scaling", "-np=8,2", "--out=a b.jsonl", "--", "python", "train.py"]
    assert main(["submit", "flux", "--nodes", "2", "--gpus-per-node", "4", "--dry-run", "--", *study]) == 0
    text = capsys.readouterr().out
    assert text.count('lockstep study scaling -H "$hosts" \\\n') == 1
    assert "#flux: --nodes=2\n" in text
    assert "lockstep run" not in text
