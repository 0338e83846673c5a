"""What `--help` says of words that may be left out."""

from __future__ import annotations

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
