"""The code has a limited size, so that new code replaces old code. See "The budget" in CONTRIBUTING.md."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
MAX_LINES = 61_311


def test_code_is_within_its_budget() -> None:
    files = [path for folder in ("src", "compat") for path in (ROOT / folder).rglob("*.py")]
    lines = sum(path.read_bytes().count(b"\n") for path in files)
    assert len(files) > 100
    assert lines <= MAX_LINES, f"{lines:,} lines: delete what the new code replaces, or raise the limit with a reason"
