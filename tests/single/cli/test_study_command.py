"""`lockstep study`: what a user types, and sees."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep.cli import main
from lockstep.cli.study import STUDIES, parse_counts
from lockstep.files.jsonl import read_records

QUICK = ["--seconds", "0.02"]
SCRIPT = [sys.executable, "absent.py"]


def test_help_lists_the_studies(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["study", "--help"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in STUDIES)
    assert main(["study"]) == 2
    assert capsys.readouterr().out == listed


@pytest.mark.parametrize("text", ["1,2,4", "1 2 4", "1, 2, 4", "1,2,4,"])
def test_counts_are_separated_by_commas_or_spaces(text: str) -> None:
    assert parse_counts("-np", text) == [1, 2, 4]


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["laoding"], "did you mean `lockstep study loading`?"),
        (["scaling", "--", "digits"], "-np '': must be numbers of workers, such as 1,2,4"),
        (["scaling", "--np", "1,2"], "missing the job to measure"),
        (["scaling", "--np", "1", "--threshold", "0", "--", "digits"], "--threshold 0: must be above 0"),
        (["scaling", "--np", "1,2", "--", "digits", "-np", "2"], "put -np, -H and other launch flags before the --"),
        (["scaling", "--np", "1,2", "--", "digits", "--resume", "auto"], "remove --resume and --evaluate"),
        (["scaling", "-np", "1,2", "--", *SCRIPT, "{batch}"], "{batch} in the command needs --global-batch N"),
        (
            ["scaling", "-np", "1,2", "--global-batch", "8", "--", *SCRIPT],
            "--global-batch needs {batch} in the command",
        ),
        (["scaling", "-np", "1,3", "--global-batch", "8", "--", *SCRIPT, "{batch}"], "must be a multiple of 3 workers"),
        (["scaling", "-np", "2,2", "--", *SCRIPT], "must be different numbers of workers"),
        (["scaling", "-np", "2", "--own-workers", "--", *SCRIPT], "--own-workers needs {np} in the command"),
        (
            ["scaling", "-np", "2", "--mode", "weak", "--global-batch", "8", "--", *SCRIPT],
            "--mode weak: with --global-",
        ),
        (["scaling", "-np", "2", "--", *SCRIPT], "absent.py: no such file"),
        (["scaling", "-np", "2", "--", "pyton", "train.py"], "to measure a script, write: -- python train.py"),
        (["scaling", "-np", "2", "--global-batch", "8", "--", "digits"], "--global-batch 8: must be left out"),
        (["batch", "--", *SCRIPT], "the command needs {batch}"),
        (["loading", "--seconds", "0", "--", "digits"], "--seconds 0: must be above 0"),
        (["loading", "--", "mnits"], "did you mean mnist?"),
        (["loading", "--out", "/dev/null/x", "--", "digits"], "--out /dev/null/x cannot be written"),
    ],
)
@pytest.mark.usefixtures("here")
def test_wrong_arguments_are_reported_with_a_hint(
    words: list[str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["study", *words]) != 0
    out, error = capsys.readouterr()
    assert hint in error
    assert error.count("\n") == 1
    assert main(["study", words[0], "--json", *words[1:]]) != 0
    assert capsys.readouterr() == (out, error)


def test_unsuitable_augmentation_is_refused_first(
    new_folder: Callable[..., Path], here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = new_folder(sizes=((90, 70), (70, 90)), train=3)
    assert main(["study", "loading", *QUICK, "--", str(root), "--rotate", "5"]) == 2
    said = capsys.readouterr()
    assert (said.out, "--rotate: only available for images held in memory" in said.err) == ("", True)


def test_loading_prints_a_table_and_appends_a_record(
    here: Path, new_folder: Callable[..., Path], capfd: pytest.CaptureFixture[str]
) -> None:
    root = new_folder(sizes=((90, 70), (70, 90)), train=6)
    job = [str(root), "--image-size", "32", "-b", "4", "-a", "cifar-small"]
    assert main(["study", "loading", "--json", "-j", "0", "1", *QUICK, "--", *job]) == 0
    sys.stderr.flush()
    results, out = capfd.readouterr()
    for part in ("the model waits", "cifar-small, fp32", "read: ", "decode: ", "augment: ", "the model needs"):
        assert part in out
    (record,) = read_records(here / "study" / "loading.jsonl")
    assert record["kind"] == "loading"
    assert (record["data"], record["samples"], record["image"], record["batch"]) == (root.name, 12, [3, 32, 32], 4)
    assert [stage["name"] for stage in record["stages"]] == ["read", "decode", "augment"]
    assert [row["processes"] for row in record["pipeline"]] == [0, 1]
    for figure in (*record["stages"], *record["pipeline"], record["demand"]):
        assert figure["images_per_second"]["low"] <= figure["images_per_second"]["high"]
    assert str(here) not in str(record)
    found = json.loads(results)
    assert (found["demand"], found["verdict"]) == (record["demand"], record["verdict"])
    shares = [row.pop("wait_share") for row in found["rows"]]
    assert found["rows"] == record["pipeline"]
    assert all(0 <= share <= 1 for share in shares)
    assert main(["study", "loading", *QUICK, "--", "digits"]) == 0  # by the recipe's augmentation
    assert len(list(read_records(here / "study" / "loading.jsonl"))) == 2


@pytest.mark.cold
def test_machine_without_torch_gets_one_line(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from lockstep.cli import main\n"
        "sys.exit(main(['study', 'scaling', '--np', '1', '--', 'digits']))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "lockstep study: error: torch is not installed\n"
