"""`python -m lockstep.observe`: its arguments."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import pytest

from lockstep.observe.__main__ import main, parse


@pytest.mark.parametrize(
    ("typed", "folder", "program"),
    [
        ("train.py --lr 1", "", "train.py --lr 1"),
        ("--dir steps train.py --dir own", "steps", "train.py --dir own"),
        ("--dir=steps -m package.train -x", "steps", "-m package.train -x"),
    ],
)
def test_only_the_flags_before_the_program_count(typed: str, folder: str, program: str) -> None:
    assert parse(typed.split()) == (folder, program.split())


@pytest.mark.parametrize("typed", ["", "--dir", "--dir steps", "--dir= train.py", "--folder x train.py", "-m", "-c x"])
def test_invalid_arguments_are_named_with_the_usage(typed: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(typed.split(), ["python"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "use: python -m lockstep.observe [--dir DIR] SCRIPT ARGUMENTS" in line


def test_the_program_gets_pythons_flags_and_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, Sequence[str], Mapping[str, str]]] = []
    monkeypatch.setattr(os, "execve", lambda *call: calls.append(call))
    main(["--dir", "steps", "train.py", "-v"], ["python", "-u"])
    main(["train.py"], ["python"])
    (path, words, variables), (_, _, others) = calls
    assert (path, words) == ("python", ["python", "-u", "train.py", "-v"])
    assert (variables["LOCKSTEP_OBSERVE"], others["LOCKSTEP_OBSERVE"]) == ("steps", "1")


def test_a_folder_is_refused_where_the_launcher_records(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOCKSTEP_PROGRESS", "/tmp/boards")
    assert main(["--dir", "steps", "train.py"], ["python"]) == 2
    assert "this job's launcher keeps the records" in capsys.readouterr().err
