"""`lockstep doctor` tells what is there, and what is wrong."""

from __future__ import annotations

import pytest

from lockstep.cli import main


def test_it_says_what_is_here(capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor"])
    said = capsys.readouterr().out
    for subject in ("torch", "backends", "gloo", "launcher", "cores", "memory", "this folder", "loopback"):
        assert subject in said


def test_stale_variables_are_named_with_the_cure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("OMP_NUM_THREADS", "500")
    assert main(["doctor"]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "unset RANK" in said
    assert "export OMP_NUM_THREADS=" in said
