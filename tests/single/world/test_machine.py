"""The commits that records name."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from lockstep.world.machine import describe_commits


def test_the_commit_is_that_of_the_script(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*words: str) -> None:
        own = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", "-C", here / "program", *own, *words], check=True, capture_output=True)

    monkeypatch.delenv("GIT_DIR")
    program = here / "program"
    program.mkdir()
    for name in ("train.py", "new.py"):
        (program / name).write_text("pass\n")
    git("init", "-q")
    git("add", "train.py")
    git("commit", "-q", "-m", "first")

    def commit(name: str) -> str:
        return describe_commits(["python", f"program/{name}", "-b", "4"])["project_commit"]

    assert commit("train.py")
    assert not commit("train.py").endswith("-dirty")
    assert commit("new.py") == ""
    assert commit("missing.py") == ""  # the current folder's
    (program / "train.py").write_text("changed\n")
    assert commit("train.py").endswith("-dirty")
