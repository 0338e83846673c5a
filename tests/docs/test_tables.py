"""The commands in the tables of the how-to pages, which no block runs, are words that Lockstep takes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from command_lines import ours, refusal
from pages import ROOT

PAGES = ("old-scripts", "migrate-from-horovod", "migrate-from-ddp", "run-anywhere")


@pytest.mark.parametrize("page", PAGES)
def test_commands_in_tables_have_flags_that_exist(
    page: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [line for line in (ROOT / "docs" / "howto" / f"{page}.md").read_text().splitlines() if line.startswith("|")]
    codes = re.findall(r"`([^`]+)`", "\n".join(rows))
    commands = [code for code in codes if "..." not in code and re.search(r"(^|\s)(lockstep|horovodrun) ", code)]
    assert len(commands) >= 5
    for command in commands:
        for name, words in ours(command):
            why = refusal(name, words, lambda: "".join(capsys.readouterr()))
            assert why is None, f"{page}: {command}\n{why}"
