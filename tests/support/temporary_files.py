"""The fixture `temporary_files`: a folder of one's own for this process's temporary files."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest


@pytest.fixture
def temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder, whose path is longer than that of a socket may be, as on some batch systems."""
    folder = tmp_path / ("project-scratch" * 6)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder
