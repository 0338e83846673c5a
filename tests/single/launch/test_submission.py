"""Submission of jobs, with stand-ins for the schedulers' programs."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep.cli import main

Programs = Callable[..., None]


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Programs:
    """Writes stand-ins, each of which notes its arguments in `words` and prints a text."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    monkeypatch.chdir(tmp_path)

    def write(**texts: str) -> None:
        for name, text in texts.items():
            (tmp_path / "bin" / f"{name}.txt").write_text(text)
            program = tmp_path / "bin" / name
            program.write_text(f'#!/bin/sh\necho "{name} $*" >> {tmp_path}/words\ncat {program}.txt\n')
            program.chmod(0o755)

    return write


@pytest.mark.parametrize(
    ("system", "printed", "words", "follow"),
    [
        (
            *("slurm", "17;bed", "sbatch --parsable --kill-on-invalid-dep=yes --dependency=afterok:3"),
            ("squeue --jobs=17 --clusters=bed", "lockstep-17.out", "scancel 17 --clusters=bed"),
        ),
        ("pbs", "17.server", "qsub -C #PBS -W depend=afterok:3", ("qstat 17.server", "lockstep.o17", "qdel 17.server")),
        ("flux", "ƒ2P", "flux batch --dependency=afterok:3", ("flux jobs ƒ2P", "lockstep-ƒ2P.out", "flux cancel ƒ2P")),
    ],
)
def test_submit_prints_how_to_follow_and_cancel(
    system: str,
    printed: str,
    words: str,
    follow: tuple[str, ...],
    programs: Programs,
    capsys: pytest.CaptureFixture[str],
) -> None:
    programs(**{words.split()[0]: f"{printed}\n"})
    for number in (1, 2):
        assert main(["submit", system, "--dependency", "afterok:3", "--", "lockstep", "train", "digits"]) == 0
        script = f"lockstep-jobs/lockstep-{number}.sh"
        assert Path("words").read_text().splitlines()[-1] == f"{words} {script}"
        id = printed.partition(";")[0]
        said = "submitted job {} (lockstep): {}\nstate: {}; output: tail -F {}; to cancel it: {}\n"
        assert capsys.readouterr().out.replace("'", "") == said.format(id, script, *follow)


def test_output_is_shown_by_tail(programs: Programs, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    programs(sbatch="17\n", tail="é\n")
    assert main(["submit", "slurm", "--follow", "--", "true"]) == 0
    assert capfd.readouterr().out.endswith("scancel 17\né\n")
    assert (tmp_path / "words").read_text().splitlines()[-1] == "tail -n +1 -F lockstep-17.out"


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
    assert main(["script", "flux", "--nodes", "2", "--gpus-per-node", "4", "--", *study]) == 0
    text = capsys.readouterr().out
    assert text.count('lockstep study scaling -H "$hosts" \\\n') == 1
    assert "#flux: --nodes=2\n" in text
    assert "lockstep run" not in text
