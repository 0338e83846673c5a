"""What a user may name as the source of a report, and what is said of what cannot be read."""

from __future__ import annotations

import gzip
from io import BufferedReader
from pathlib import Path

import pytest
from report_material import batch_record, make_run, run_records, scaling_record, write_lines

from lockstep.errors import ConfigError
from lockstep.files.untrusted import open_plain
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
    make_run(tmp_path / "begun", [])
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
    ("name", "content", "described"),
    [
        (
            "trace.json",
            b'{\n "schemaVersion": 1,\n "traceEvents": [\n{}\n]}',
            "a Chrome trace (torch.profiler, HOROVOD",
        ),
        ("trace.jsonl", b'{"schemaVersion": 1, "traceEvents": [{"ph": "X"}]}\n', "a Chrome trace"),
        ("timeline.json", b'[\n{"pid": 0, "ph": "M"},\n{"pid": 0, "ph": "X"}\n]', "a Chrome trace"),
        ("list.json", b'[{"kind": "scaling"}]', "one JSON document instead of records, which are one JSON object per"),
        ("config.json", b'{\n  "seed": 0\n}', "one JSON document"),
        ("study.jsonl.gz", gzip.compress(b"{}", mtime=0), "a binary file"),
        ("net.pt", b"PK\x03\x04\0\0", "a checkpoint or an archive; pass the run folder"),
        ("net.safetensors", (60).to_bytes(8, "little") + b'{"weight"', "a checkpoint"),
        ("events.out.tfevents.1.host", b"\x18" + bytes(22) + b"\x1a\rbrain.Event:2", "a file of TensorBoard"),
        ("a.npy", b"\x93NUMPY\x01\0", "a binary file"),
        (
            "rates.csv",
            b"workers,rate\n1,2\n\n2,4\n",
            "a text file without records, which are one JSON object per line (",
        ),
        ("blank.txt", b"a" + b"\n" * 100_000, "a text file"),
    ],
)
def test_other_files_are_described_in_one_line(name: str, content: bytes, described: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    study = write_lines(tmp_path / "scaling.jsonl", [scaling_record(1)], "\0" * 100)
    found = gather([path, study])
    assert len(found.studies) == 1
    assert [warning for warning in found.warnings if str(path) in warning] == [found.warnings[0]]
    assert found.warnings[0].startswith(f"{path}: skipped, as it is {described}")


def test_a_file_that_cannot_be_opened_does_not_hide_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_lines(tmp_path / "a.jsonl", [batch_record(32)])
    write_lines(tmp_path / "b.jsonl", [batch_record(64)])

    def refuse(path: Path) -> BufferedReader:
        if path.name == "a.jsonl":
            raise PermissionError(13, "Permission denied")
        return open_plain(path)

    monkeypatch.setattr("lockstep.files.jsonl.open_plain", refuse)
    found = gather([tmp_path])
    assert [record["batch"] for record in found.studies] == [64]
    assert found.warnings == [f"cannot read {tmp_path / 'a.jsonl'}: Permission denied"]
