"""Refuse subjects of commits that have two topics or are too long: a hook of pre-commit, and a check of pull requests.

python tools/commit_subject.py .git/COMMIT_EDITMSG         # the commit that is made
python tools/commit_subject.py --range origin/main..HEAD   # the commits of a branch
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

MAX_LENGTH = 72


def faults(subject: str) -> list[str]:
    """Return what is wrong with a subject, each with the fix."""
    found = []
    if not subject:
        found.append("empty: write what the commit does, in the imperative")
    if len(subject) > MAX_LENGTH:
        found.append(f"{len(subject)} characters: write at most {MAX_LENGTH}, and the rest in the body")
    if re.search(r"\band\b|;", subject, re.IGNORECASE):
        found.append('"and" or ";": make one commit per topic')
    if subject.endswith("."):
        found.append("ends with a period: leave it out")
    return found


def subject_of(message: str) -> str:
    """Return the first line of a message that is neither empty nor one of git's comments."""
    lines = (line.strip() for line in message.splitlines())
    return next((line for line in lines if line and not line.startswith("#")), "")


def _of_range(commits: str) -> list[str]:
    command = ["git", "log", "--no-merges", "--format=%s", commits, "--"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"--range {commits}: git does not know these commits")
    return done.stdout.splitlines()


def main() -> int:
    parser = argparse.ArgumentParser(description="Refuse subjects of commits that have two topics or are too long.")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("message", nargs="?", type=Path, metavar="FILE", help="file with the message of a commit")
    source.add_argument("--range", metavar="A..B", help="commits to check")
    arguments = parser.parse_args()
    subjects = _of_range(arguments.range) if arguments.range else [subject_of(arguments.message.read_text("utf-8"))]
    refused = [(subject, fault) for subject in subjects for fault in faults(subject)]
    for subject, fault in refused:
        print(f"{subject!r}: {fault}", file=sys.stderr)
    return 1 if refused else 0


if __name__ == "__main__":
    sys.exit(main())
