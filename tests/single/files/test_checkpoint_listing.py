"""The checkpoints of a run, found by their names."""

from __future__ import annotations

from pathlib import Path

from lockstep.files.checkpoint_listing import all_in, complete, newest


def test_checkpoints_are_sorted_by_step_and_other_names_skipped(tmp_path: Path) -> None:
    for name in ("step-99999999", "step-100000000", "step-00000005", "step-x", "step-", ".partial-step-00000006"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").touch()
    (tmp_path / "step-200000000").mkdir()  # its manifest is lost
    (tmp_path / "step-00000007").touch()
    names = ["step-00000005", "step-99999999", "step-100000000"]
    assert [path.name for path in complete(tmp_path)] == names
    assert [path.name for path in all_in(tmp_path)] == [*names, "step-200000000"]
    assert newest(tmp_path) == tmp_path / names[-1]
    assert newest(tmp_path / "missing") is None
