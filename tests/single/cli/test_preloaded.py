"""What workers of `lockstep train` find done by the process that they are forked from."""

from __future__ import annotations

import subprocess
import sys

PRELOAD = "import sys; sys.argv = ['lockstep', 'train', *sys.argv[1:]]; import lockstep.cli.preloaded\n"
READ_AGAIN = """\
import tyro
from lockstep.cli.parse import parse_train
def refuse(*arguments, **settings): raise AssertionError("read again")
tyro.cli = refuse
print(parse_train(sys.argv[2:]).job.batch_size)
"""


def _run(code: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)


def test_their_command_line_has_been_read() -> None:
    done = _run(PRELOAD + READ_AGAIN, "digits", "-b", "17")
    assert (done.returncode, done.stdout) == (0, "17\n"), done.stderr


def test_a_wrong_one_is_left_to_them_to_refuse() -> None:
    for words in (["digits", "--no-such-flag"], ["digits", "--config", "absent.yaml"], ["--help"]):
        done = _run(PRELOAD, *words)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
