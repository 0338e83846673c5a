"""What a user may name as the source of a report, and what is said of what cannot be read."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from report_material import batch_record, make_run, run_records, scaling_record, write_lines

from lockstep.errors import ConfigError
from lockstep.report.sources import gather


def test_runs_studies_and_folders_of_them_are_found_each_once(tmp_path: Path) -> None:
    first = make_run(tmp_path / "runs" / "first")
    make_run(tmp_path / "runs" / "second")
    make_run(tmp_path / "runs" / "second" / "checkpoints" / "no-run")
    study = write_lines(tmp_path / "study" / "scaling.jsonl", [scaling_record(1), scaling_record(2)])
    write_lines(tmp_path / "study" / "batch.jsonl", [batch_record(32)])
    found = gather([first, tmp_path / "runs", study, tmp_path / "study", first / "metrics.jsonl"])
    assert [run.path.name for run in found.runs] == ["first", "second"]
    assert [record["kind"] for record in found.studies] == ["scaling", "scaling", "batch"]
    assert len(found.of_kind("scaling")) == 2
    assert not found.warnings


def test_a_metrics_file_under_another_name_is_a_run(tmp_path: Path) -> None:
    found = gather([write_lines(tmp_path / "copy.jsonl", run_records())])
    assert (len(found.runs), len(found.studies)) == (1, 0)


def test_what_cannot_be_read_is_said_and_the_rest_is_reported(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", rest='{"kind": "step", "st')
    (run / "environment.json").unlink()
    (run / "config.yaml").write_text("a: [")
    (tmp_path / "empty").mkdir()
    make_run(tmp_path / "begun", [{"kind": "other"}])
    study = write_lines(tmp_path / "scaling.jsonl", [scaling_record(1)], 'broken\n\n[1]\n{"a"')
    found = gather([run, tmp_path / "none", tmp_path / "empty", tmp_path / "begun", study])
    assert (len(found.runs), len(found.studies)) == (1, 1)
    for part in (
        "run/metrics.jsonl: skipped 1 damaged line (line 14)",
        "run has no environment.json",
        f"cannot read {run}/config.yaml: ",
        "none does not exist",
        "empty: skipped, as it has no metrics.jsonl and no .jsonl files",
        "begun/metrics.jsonl: skipped, as it has no records of a run yet",
        "scaling.jsonl: skipped 3 damaged lines (lines 2, 4, 5)",
    ):
        assert any(part in warning for warning in found.warnings), (part, found.warnings)


def test_nothing_at_all_is_an_error_that_says_why(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        ConfigError, match=r"nothing to report: .*none does not exist; .*empty: skipped, as it has no metrics"
    ) as raised:
        gather([tmp_path / "none", tmp_path / "empty"])
    assert raised.value.exit_code == 2


@pytest.mark.parametrize(
    "content", [b'[{"kind": "scaling"}]', b"workers,rate\n1,2\n", b"PK\3\4\0\0", b"a" + b"\n" * 100_000, b""]
)
def test_a_file_without_records_is_named_in_one_line(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "other"
    path.write_bytes(content)
    found = gather([path, write_lines(tmp_path / "scaling.jsonl", [scaling_record(1)])])
    assert len(found.studies) == 1
    (warning,) = found.warnings
    assert warning.startswith(f"{path} has no records, which are one JSON object per line (docs/")


@pytest.mark.skipif(sys.platform != "linux", reason="needs a file that cannot be read, even by root")
def test_a_file_that_cannot_be_read_does_not_hide_others(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").symlink_to("/proc/self/mem")  # which has no first byte
    write_lines(tmp_path / "b.jsonl", [batch_record(64)])
    found = gather([tmp_path])
    assert [record["batch"] for record in found.studies] == [64]
    assert found.warnings == [f"cannot read {tmp_path / 'a.jsonl'}: Input/output error"]
