"""What workers of `lockstep train` find done by the process that they are forked from."""

from __future__ import annotations

import runpy
import subprocess
import sys

import pytest

PRELOAD = "import sys; sys.argv = ['lockstep', 'train', *sys.argv[1:]]; import lockstep.cli.before_fork\n"
READ_AGAIN = """\
from lockstep.cli import parse
def refuse(*arguments, **settings): raise AssertionError("read again")
parse.read = refuse
print(parse.parse_train(sys.argv[2:]).job.batch_size)
"""


@pytest.mark.cold
def test_their_command_line_has_been_read() -> None:
    command = [sys.executable, "-c", PRELOAD + READ_AGAIN, "digits", "-b", "17"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "17\n", "")


def test_without_tensorboard_the_rest_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "lockstep.cli.before_fork", raising=False)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    monkeypatch.setattr(sys, "argv", ["lockstep", "eval"])
    assert "parse_train" in runpy.run_module("lockstep.cli.before_fork")


@pytest.mark.parametrize("words", [["digits", "--no-such-flag"], ["digits", "--config", "absent.yaml"], ["--help"]])
def test_a_wrong_one_is_left_to_them_to_refuse(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "lockstep.cli.before_fork", raising=False)
    monkeypatch.setattr(sys, "argv", ["lockstep", "train", *words])
    runpy.run_module("lockstep.cli.before_fork")
    assert capfd.readouterr() == ("", "")
