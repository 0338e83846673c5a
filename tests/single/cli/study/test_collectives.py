"""`lockstep study collectives`: wrong words, before any worker starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.cli import main


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ([], "collectives need at least two workers; for example, add -np 2"),
        (["-np", "1"], "collectives need at least two workers"),
        (["-np", "0"], "-np 0: must be at least 1"),
        (["--max-size", "many"], "--max-size many: must be a size such as"),
        (["--min-size", "2K", "--max-size", "1K"], "--min-size 2K: must be at most --max-size 1K"),
        (["--factor", "1"], "--factor 1: must be at least 2"),
        (["--repeats", "0"], "--repeats 0: must be at least 1"),
        (["--seconds", "0"], "--seconds 0: must be above 0"),
        (["--operations", "gather"], "all_gather"),
        (["--dtype", "int8"], "bfloat16"),
        (["-np", "2", "-H", "a:1", "--hostfile", "b"], "--hosts and --hostfile both name the hosts"),
    ],
)
def test_wrong_arguments_name_the_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], hint: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["study", "collectives", *words]) == 2
    assert hint in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
