"""What --help prints: what is required, the default that will hold, and all that fits a screen."""

from __future__ import annotations

import io
import re
from contextlib import redirect_stdout, suppress
from typing import Protocol

import pytest

from lockstep.cli import COMMANDS, horovodrun, main
from lockstep.cli.data import ACTIONS
from lockstep.cli.study import STUDIES

EVERY = [*COMMANDS, *(f"data {action}" for action in ACTIONS), *(f"study {study}" for study in STUDIES)]
SCREEN = 50  # lines


class Explain(Protocol):
    def __call__(self, command: str, flag: str = "--help", columns: int = 100) -> str: ...


@pytest.fixture
def explain(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Explain:
    def explain(command: str, flag: str = "--help", columns: int = 100) -> str:
        monkeypatch.setenv("COLUMNS", str(columns))
        words = [*command.split(), flag]
        try:
            code = horovodrun.main(words[1:]) if command == "horovodrun" else main(words)
        except SystemExit as stopped:
            code = stopped.code  # type: ignore[assignment]
        said = capsys.readouterr()
        assert (code, said.err) == (0, "")
        return said.out

    return explain


@pytest.mark.parametrize("command", [*EVERY, "horovodrun", ""])
def test_help_fits_a_screen_and_its_width(command: str, explain: Explain) -> None:
    text = explain(command)
    assert len(text.splitlines()) <= SCREEN
    assert text == explain(command, "-h")
    for columns in (80, 100, 160):
        for flag in ("--help", "--help-all"):
            assert max(map(len, explain(command, flag, columns).splitlines())) <= columns


@pytest.mark.parametrize("command", [*EVERY, "horovodrun"])
def test_help_is_plain(command: str, explain: Explain) -> None:
    text = explain(command, "--help-all")
    assert not re.search(r"default: (None|False|'')?\)|\{None\}|Default:|\x1b|[│╭]", text)
    for line in text.splitlines():
        assert len(re.sub(r"\(.*?\)", "", line).split()) <= 24, line


@pytest.mark.parametrize(
    ("command", "row"),
    [
        ("train", "-b, --batch-size INT"),
        ("train", "-np N|auto"),
        ("train", "--optimizer {sgd,adam,adamw,lars,lamb,muon}"),
        ("train", "--dry-run "),
        ("train", "--[no-]nesterov .* (default: on)"),
        ("train", "--no-preload "),
        ("train", "-e, --evaluate "),
        ("watch", "usage: lockstep watch [RUN] [flags]"),
        ("watch", "RUN .* (default: the newest in runs/)"),
        ("report", "usage: lockstep report RUN|STUDY ... [flags]"),
        ("study predict", "usage: lockstep study predict [FILE.jsonl ...] [flags]"),
        ("models", "usage: lockstep models"),
        ("horovodrun", "--fusion-threshold-mb MB"),
    ],
)
def test_a_flag_is_shown_as_it_is_written(command: str, row: str, explain: Explain) -> None:
    text = explain(command, "--help-all")
    pattern = re.escape(row).replace(r"\ \.\*\ ", ".*").replace(r"\ ", " +")
    assert re.search(rf"(?m)^ *{pattern}", text), text


def test_train_shows_what_most_need_and_how_to_see_all(explain: Explain) -> None:
    short, everything = explain("train"), explain("train", "--help-all")
    titles = re.findall(r"(?m)^(\w+)$", short)
    assert titles == ["Data", "Model", "Training", "Workers", "Output", "Examples"]
    assert 20 <= len(re.findall(r"(?m)^  -", short)) <= 25
    assert f"`lockstep train --help-all` shows all {len(re.findall(r'(?m)^  -', everything))} flags." in short
    assert len(re.findall(r"(?m)^  lockstep train ", short)) == 3


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_bold_is_for_terminals(explain: Explain, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = explain("watch")
    monkeypatch.setenv("TERM", "xterm")
    shown = []
    for name in ("no such variable", "NO_COLOR"):
        monkeypatch.delenv("NO_COLOR", raising=False)
        monkeypatch.setenv(name, "1")
        with redirect_stdout(Terminal()) as terminal, suppress(SystemExit):
            main(["watch", "--help"])
        shown.append(terminal.getvalue())
    assert shown[0].startswith("\033[1musage:\033[0m lockstep watch")
    assert re.sub(r"\033\[\d+m", "", shown[0]) == shown[1] == plain


@pytest.mark.parametrize(
    ("words", "defaults"),
    [
        ([], {"--epochs INT": "30", "--optimizer": "adamw", "Arguments DATASET|FOLDER": "digits"}),
        (["cifar10"], {"--epochs INT": "200", "--optimizer": "sgd", "Arguments DATASET|FOLDER": "cifar10"}),
        (["imagenet", "-a", "alexnet", "--epochs", "7"], {"--epochs INT": "7", "--learning-rate FLOAT": "0.01"}),
        (["--config", "cifar10-small"], {"--epochs INT": "10", "--schedule": "onecycle"}),
        (["cifar10", "--nosuch", "-b", "x"], {"--epochs INT": "30"}),  # what is wrong is not in the way of help
    ],
)
def test_trains_help_has_the_defaults_that_will_hold(
    words: list[str], defaults: dict[str, str], explain: Explain
) -> None:
    text = " ".join(explain(" ".join(["train", *words]), "--help-all").split())
    for flag, value in defaults.items():
        assert re.findall(rf"{re.escape(flag)}.*?\(default: (.*?)\)", text)[0] == value, flag


def test_a_terminal_too_narrow_to_read_still_gets_help(explain: Explain) -> None:
    assert explain("train", columns=1) == explain("train", columns=40)
