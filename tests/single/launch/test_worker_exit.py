"""What becomes of an exception in a worker: an exit code, and word to the launcher or the terminal."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lockstep.errors import ConfigError, LostPeerError, StoppedError, WorldError
from lockstep.launch.worker_exit import REQUESTS, exit_code_of
from lockstep.world.launcher_environment import RankInfo


@pytest.fixture(autouse=True)
def _handlers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Keep this process's signal handlers."""
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    handlers = {number: signal.getsignal(number) for number in REQUESTS}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def _raises(error: BaseException) -> Callable[[Any], None]:
    def work(world: Any) -> None:
        raise error

    return work


def _exit(error: BaseException, launcher: str = "none") -> int:
    return exit_code_of(_raises(error), RankInfo(rank=3, size=4, launcher=launcher), "cpu", "auto")


@pytest.mark.parametrize(
    ("error", "code", "said", "final", "lost_peer"),
    [
        (ConfigError("--lr is wrong"), 2, "lockstep: error: --lr is wrong\n", True, False),
        (WorldError("nobody is there"), 3, "lockstep: error: nobody is there\n", False, False),
        (KeyboardInterrupt(), 130, "lockstep: interrupted", None, None),
        (StoppedError("stopped after step 3"), 75, "lockstep: stopped after step 3\n", True, False),
        (ZeroDivisionError("of the user's"), 1, "ZeroDivisionError: of the user's\n", False, False),
        (RuntimeError("Connection reset by peer"), 1, "lockstep: error: lost the connection to a peer", False, True),
        (LostPeerError("rank 1 is gone"), 1, "lockstep: error: rank 1 is gone\n", False, True),
    ],
)
def test_error_is_an_exit_code_and_a_line_or_a_file(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    code: int,
    said: str,
    final: bool | None,
    lost_peer: bool | None,
) -> None:
    assert _exit(error) == code
    assert said in capsys.readouterr().err
    if final is None:
        return
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    assert _exit(error, launcher="torchrun") == code
    content = json.loads(file.read_text())
    ours = content["lockstep"]
    assert (ours["exit_code"], ours["final"], ours["lost_peer"]) == (code, final, lost_peer)
    assert content["message"]["message"] == ours["text"]
    assert capsys.readouterr().err == ""


def test_finished_work_is_not_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code_of(lambda world: None, RankInfo(), "cpu", "auto") == 0
    assert capsys.readouterr().err == ""


def test_a_check_comes_before_the_work() -> None:
    check = lambda: _raises(ConfigError("no"))(None)  # noqa: E731
    assert exit_code_of(lambda world: pytest.fail("it works"), RankInfo(), "cpu", "auto", check) == 2


def test_a_worker_that_stops_hears_no_further_request() -> None:
    _exit(StoppedError("stopped"))
    assert {signal.getsignal(number) for number in REQUESTS} == {signal.SIG_IGN}
