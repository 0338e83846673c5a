"""tools/commit_subject.py refuses subjects that have two topics or are too long."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import commit_subject
import pytest
from pages import ROOT


@pytest.mark.parametrize(
    ("subject", "fault"),
    [
        ("Add a loader and a sampler", "one commit per topic"),
        ("Add a loader; test it", "one commit per topic"),
        ("A" * 73, "73 characters"),
        ("Add a loader.", "period"),
        ("", "empty"),
    ],
)
def test_subjects_with_faults_are_refused(subject: str, fault: str) -> None:
    (found,) = commit_subject.faults(subject)
    assert fault in found


@pytest.mark.parametrize("subject", ["A" * 72, "Expand the handbook", "Name bandwidth in GB/s"])
def test_good_subjects_are_accepted(subject: str) -> None:
    assert not commit_subject.faults(subject)


def test_comments_of_git_are_no_subject() -> None:
    assert commit_subject.subject_of("# Please enter a message\n\n  Add a loader \n\nand more\n") == "Add a loader"


@pytest.mark.cold
def test_hook_and_range_name_each_refused_subject(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GIT_DIR")

    def git(*arguments: str) -> None:
        identity = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True)

    def check(*arguments: str) -> tuple[int, str]:
        command = [sys.executable, ROOT / "tools" / "commit_subject.py", *arguments]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        return done.returncode, done.stderr

    git("init", "--quiet")
    for subject in ("Add this and that", "Add a loader", "Add a test; fix it"):
        git("commit", "--quiet", "--allow-empty", "-m", subject)
    assert check("--range", "HEAD~2..HEAD~1") == (0, "")
    code, errors = check("--range", "HEAD~2..HEAD")
    assert code == 1
    assert "'Add a test; fix it'" in errors
    assert "Add this" not in errors
    (tmp_path / "message").write_text("Add this and that\n")
    assert check("message")[0] == 1
    (tmp_path / "message").write_text("Add a loader\n\nand a body\n")
    assert check("message") == (0, "")
    assert check("--range", "unknown..HEAD")[0] != 0
