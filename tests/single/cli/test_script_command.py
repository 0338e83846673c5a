"""`lockstep script` as it is typed."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.cli import main


def test_it_writes_to_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["script", "slurm", "--nodes", "2", "-np", "4", "--partition", "gpu", "--", "python", "x.py"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("#!/bin/bash\n# 2 nodes, 2 workers on each.")
    assert "#SBATCH --partition=gpu\n" in text
    assert text.endswith('exit "$code"\n')


def test_flags_after_the_double_dash_belong_to_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["script", "pbs", "--", "python", "x.py", "--nodes", "9", "--", "--time"]) == 0
    text = capsys.readouterr().out
    assert "    python x.py --nodes 9 -- --time &\n" in text
    assert "select=1:" in text


def test_a_file_is_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "job.sh"
    words = ["script", "lsf", "--output", str(file)]
    assert main([*words, "--", "true"]) == 0
    assert capsys.readouterr() == ("", f"submit it with: bsub < {file}\n")
    first = file.read_text()
    assert main([*words, "--", "false"]) == 2
    assert "already exists; choose another, or add --force" in capsys.readouterr().err
    assert file.read_text() == first
    assert main([*words, "--force", "--", "false"]) == 0
    assert "    false &\n" in file.read_text()
    assert main(["script", "lsf", "--output", str(tmp_path / "none" / "job.sh"), "--", "true"]) == 2
    assert "cannot be written: No such file" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["slurm"], ["slurm", "--"]])
def test_a_command_is_needed(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["script", *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("lockstep script: error: missing COMMAND; add it after --")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["slurm", "--time", "10"], "--time '10': must be [D-]HH:MM:SS"),
        (["slurm", "--gpus-per-node", "4", "-np", "1"], "1 worker and 4 GPUs per node"),
        (["sge"], "sge: must be slurm, pbs or lsf"),
    ],
)
def test_wrong_arguments_get_one_message(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["script", *words, "--", "true"]) == 2
    assert message in capsys.readouterr().err
