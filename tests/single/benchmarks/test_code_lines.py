"""The lines of code of a script are its lines without blank ones, comments and docstrings."""

from __future__ import annotations

from pathlib import Path

from code_lines import code_lines

SCRIPT = '''"""A script.

With a description.
"""

import os  # counted

# not counted
name = """two
lines"""


def double(
    value: int,
) -> int:
    """Return twice the value."""
    return 2 * value  # counted once
'''


def test_imports_and_all_lines_of_a_statement_count(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    assert code_lines(script) == 7
    assert code_lines(script, script) == 14
    assert code_lines() == 0
