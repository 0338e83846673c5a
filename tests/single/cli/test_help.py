"""What `--help` says of words that may be left out."""

from __future__ import annotations

import re

import pytest

from lockstep.cli import main


@pytest.mark.parametrize(
    ("words", "usage", "default"),
    [
        (["watch"], "lockstep watch [-h] [RUN] ", "Default: the newest in runs/."),
        (["report"], "lockstep report [-h] RUN|STUDY [...] ", "folders of such as runs/ and study/."),
        (["study", "predict"], "lockstep study predict [-h] [FILE.jsonl ...] ", "Default: study/scaling.jsonl."),
    ],
)
def test_help_names_what_is_optional_and_each_default_once(
    capsys: pytest.CaptureFixture[str], words: list[str], usage: str, default: str
) -> None:
    with pytest.raises(SystemExit):
        main([*words, "--help"])
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert usage in text
    assert default in text
    for empty in ("(default: )", "(default: None)", "(default: '')"):
        assert empty not in text


@pytest.mark.parametrize(
    ("words", "defaults"),
    [
        ([], {"--epochs INT": "30", "--optimizer": "adamw", "DATASET|FOLDER": "digits"}),
        (["cifar10"], {"--epochs INT": "200", "--optimizer": "sgd", "DATASET|FOLDER": "cifar10"}),
        (["imagenet", "-a", "alexnet", "--epochs", "7"], {"--epochs INT": "7", "--lr FLOAT": "0.01"}),
        (["--config", "cifar10-small"], {"--epochs INT": "10", "--schedule": "onecycle"}),
        (["cifar10", "--nosuch", "-b", "x"], {"--epochs INT": "30"}),  # what is wrong is not in the way of help
    ],
)
def test_trains_help_has_the_defaults_that_will_hold(
    capsys: pytest.CaptureFixture[str], words: list[str], defaults: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")  # in one column
    with pytest.raises(SystemExit):
        main(["train", *words, "--help"])
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for flag, value in defaults.items():
        assert re.findall(rf"{re.escape(flag)}.*?\(default: (.*?)\)", text)[0] == value, flag
