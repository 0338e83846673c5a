"""`lockstep report`: what a user types, sees and finds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from disks import largest_file
from report_material import make_run, scaling_record, write_lines

from lockstep.cli import main

WITHOUT_TORCH = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "torchvision", "tensorflow"):
            raise ImportError(f"{name} is not installed")
sys.meta_path.insert(0, Refuse())
from lockstep.cli import main
raise SystemExit(main(sys.argv[1:]))
"""


@pytest.fixture
def sources(tmp_path: Path) -> list[str]:
    """A run folder and a study."""
    run = make_run(tmp_path / "run", rest='{"half')
    study = write_lines(tmp_path / "scaling.jsonl", [scaling_record(workers) for workers in (1, 2, 4)])
    return [str(path) for path in (run, study)]


@pytest.mark.cold
def test_the_report_is_made_without_torch(sources: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = ["report", *sources, str(tmp_path / "none"), "-o", str(out), "--title", "My title", "-v"]
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    *listed, last = done.stdout.splitlines()
    assert last == f"open {out / 'index.html'}"
    written = set(map(Path, listed))
    figure, table = out / "figures" / "scaling-strong-throughput", out / "tables" / "scaling-strong-throughput-points"
    named = {
        figure.with_suffix(".svg"),
        figure.with_suffix(".pdf"),
        table.with_suffix(".csv"),
        table.with_suffix(".tex"),
    }
    assert {out / "RESULTS.md", out / "index.html", *named} <= written
    assert all(path.stat().st_size > 100 for path in written)
    assert {path for path in out.rglob("*") if path.is_file()} == written
    text = (out / "RESULTS.md").read_text()
    assert text.startswith("# My title\n")
    for link in (part.partition(")")[0] for part in text.split("](")[1:]):
        assert (out / link).is_file(), link
    for warning in ("none does not exist", "skipped 1 damaged line"):
        assert f"{warning}" in done.stderr
        assert warning in text
        assert warning in (out / "index.html").read_text()


def test_the_page_to_open_is_all_that_is_printed(
    sources: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", sources[1], "-o", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out == f"open {tmp_path / 'out' / 'index.html'}\n"


def test_a_second_report_replaces_the_first(sources: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert main(["report", sources[0], "-o", str(out), "--title", "First"]) == 0
    assert main(["report", sources[0], "-o", str(out), "--title", "Second"]) == 0
    assert "Second" in (out / "index.html").read_text()
    assert not [path for path in out.rglob(".*") if path.is_file()]


def test_control_characters_in_names_are_escaped_in_the_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = os.fsdecode(b"a\x1b]0;x\x07 \xff\xe2\x80\xae\n|<b>$x$")
    runs = [make_run(tmp_path / f"{odd}{number}") for number in range(2)]
    out = tmp_path / "out"
    assert main(["report", *map(str, runs), "-o", str(out), "--title", odd]) == 0
    for path in (out / "RESULTS.md", out / "index.html", *out.rglob("*.svg")):
        text = path.read_text(encoding="utf-8")
        unsafe = [sign for sign in text if not sign.isprintable() and not sign.isspace()]
        assert unsafe == [], (path, unsafe)
    assert "<b>" not in (out / "index.html").read_text()
    printed = capsys.readouterr()
    assert "\x1b" not in printed.out + printed.err


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ([], "missing the folders to report on"),
        (["/nowhere/at/all"], "nothing to report: /nowhere/at/all does not exist"),
        (["--threshold", "75", "study"], "--threshold 75: must be above 0 and at most 1"),
        (["--samples", "0", "study"], "--samples 0: must be at least 1"),
        (["--carbon", "-1", "study"], "--carbon -1: must be 0 or more grams per kWh"),
    ],
)
def test_nothing_to_report_is_one_line(words: list[str], hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", *words]) == 2
    said = capsys.readouterr()
    assert hint in said.err
    assert (said.out, said.err.count("\n")) == ("", 1)


def test_an_output_folder_that_cannot_be_made_is_one_line(
    sources: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", sources[1], "-o", "/dev/null/x"]) == 2
    assert "-o /dev/null/x cannot be written: " in capsys.readouterr().err


def test_a_full_disk_is_one_line_and_leaves_no_part_of_a_file(
    sources: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with largest_file(100):
        assert main(["report", sources[1], "-o", str(tmp_path / "out")]) == 2
    assert f"-o {tmp_path / 'out'} cannot be written: File too large" in capsys.readouterr().err
    assert not [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
