"""One writer per folder, whatever others do and however the last one ended."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from lockstep.errors import ConfigError, LockstepError
from lockstep.files import folder_lock
from lockstep.files.folder_lock import LOCK_FILE, FolderLock, LockTimes, Owner, hold_folder, holding

ELSEWHERE = "another boot pid:[1]"


USUAL = LockTimes()
BELIEVES_CLOCKS = LockTimes(watch=0.0)  # the age of a lock counts at once


def _hold(folder: Path, owner: Owner, times: LockTimes = USUAL) -> FolderLock:
    return hold_folder(folder, owner, "choose another", times)


def _leave(folder: Path, owner: Owner, touched_seconds_ago: float = 0.0) -> Path:
    """A lock as its holder, killed or elsewhere, left it."""
    path = folder / LOCK_FILE
    path.write_text(json.dumps(dataclasses.asdict(owner)))
    then = path.stat().st_mtime - touched_seconds_ago
    os.utime(path, (then, then))
    return path


def _elsewhere(**fields: object) -> Owner:
    return dataclasses.replace(Owner("lockstep train"), host="far", machine=ELSEWHERE, **fields)  # type: ignore[arg-type]


@contextmanager
def _beating(path: Path) -> Iterator[None]:
    """Touch a lock again and again, as a holder elsewhere does."""
    done = threading.Event()

    def beat() -> None:
        while not done.wait(0.01):
            path.touch()

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def test_a_second_process_is_refused_with_the_name_of_the_first(tmp_path: Path) -> None:
    lock = _hold(tmp_path, Owner("lockstep train", job="Slurm job 7"))
    with pytest.raises(ConfigError, match=rf"by lockstep train \(Slurm job 7\), process {os.getpid()} on .*; cho"):
        _hold(tmp_path, Owner("lockstep train"))
    lock.close()
    assert not list(tmp_path.iterdir())
    _hold(tmp_path, Owner("lockstep train")).close()


def test_the_holder_of_this_machine_is_found_without_a_lock(tmp_path: Path) -> None:
    assert folder_lock.holder_here(tmp_path) is None
    with holding(tmp_path, "packing"):
        assert str(folder_lock.holder_here(tmp_path)).startswith("packing")
    _leave(tmp_path, _elsewhere())
    assert folder_lock.holder_here(tmp_path) is None  # it may have ended


def test_a_block_holds_a_folder_and_gives_it_back_after_an_error(tmp_path: Path) -> None:
    with suppress(ZeroDivisionError), holding(tmp_path, "packing"):
        assert (tmp_path / LOCK_FILE).exists()
        raise ZeroDivisionError
    assert not (tmp_path / LOCK_FILE).exists()


def _hold_and_be_killed(folder: Path) -> None:
    _hold(folder, Owner("lockstep train"))
    os.kill(os.getpid(), signal.SIGKILL)


def test_what_a_killed_process_held_is_taken_over_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    child = multiprocessing.get_context("fork").Process(target=_hold_and_be_killed, args=(tmp_path,))
    child.start()
    child.join()
    assert (tmp_path / LOCK_FILE).exists()
    _hold(tmp_path, Owner("lockstep train")).close()
    assert not capsys.readouterr().err  # on one machine that is certain, and nothing to tell


def test_another_process_with_the_same_number_is_not_the_holder(tmp_path: Path) -> None:
    _leave(tmp_path, dataclasses.replace(Owner("lockstep train"), started=1.0))
    _hold(tmp_path, Owner("lockstep train")).close()


def test_a_silent_holder_on_another_host_counts_as_dead(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _leave(tmp_path, _elsewhere(), touched_seconds_ago=90)
    _hold(tmp_path, Owner("lockstep train"), BELIEVES_CLOCKS).close()
    (line,) = capsys.readouterr().err.splitlines()
    assert "which was silent for" in line


def test_a_holder_elsewhere_that_gives_a_sign_keeps_the_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with _beating(_leave(tmp_path, _elsewhere())), pytest.raises(ConfigError, match=r"in use by .* on far, since"):
        _hold(tmp_path, Owner("lockstep train"))
    (line,) = capsys.readouterr().err.splitlines()
    assert "for its heartbeat" in line


@pytest.mark.parametrize("touched_seconds_ago", [0.0, -7200.0, 7200.0])
def test_silence_is_waited_for_whatever_the_clocks_say(tmp_path: Path, touched_seconds_ago: float) -> None:
    started = time.monotonic()
    _leave(tmp_path, _elsewhere(), touched_seconds_ago)
    _hold(tmp_path, Owner("lockstep train"), LockTimes(silent=0.3, poll=0.01)).close()
    assert time.monotonic() - started > 0.3


@pytest.mark.parametrize("content", ["", "{}", "[" * 60_000, '{"pid": 1e999}', '{"since": %s}' % ("9" * 400), "\0"])
def test_a_damaged_lock_counts_by_its_silence_alone(tmp_path: Path, content: str) -> None:
    (tmp_path / LOCK_FILE).write_text(content)
    os.utime(tmp_path / LOCK_FILE, (1, 1))
    _hold(tmp_path, Owner("lockstep train"), BELIEVES_CLOCKS).close()


def test_a_hostile_lock_steers_no_terminal(tmp_path: Path) -> None:
    _leave(tmp_path, dataclasses.replace(Owner("lockstep \x1b[31mtrain"), host="a\nb"))
    with pytest.raises(ConfigError) as caught:
        _hold(tmp_path, Owner("lockstep train"))
    assert "\x1b" not in str(caught.value)


def test_a_lock_that_is_not_a_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / LOCK_FILE
    for make in (lambda: os.mkfifo(path), lambda: path.symlink_to("nowhere")):
        make()
        with pytest.raises((ConfigError, OSError), match="remove it"):
            _hold(tmp_path, Owner("lockstep train"))
        path.unlink()


@pytest.mark.parametrize(("number", "follows"), [(1, True), (0, False)])
def test_a_restart_or_requeue_goes_on_at_once(tmp_path: Path, number: int, follows: bool) -> None:
    path = _leave(tmp_path, _elsewhere(series={"Slurm job 7": 0}))
    own = Owner("lockstep train", series={"Slurm job 7": number, "other": 3})
    with _beating(path):
        if follows:
            _hold(tmp_path, own).close()
        else:
            with pytest.raises(ConfigError, match="in use"):
                _hold(tmp_path, own)


@pytest.mark.parametrize("rounds", [10, pytest.param(100, marks=pytest.mark.long)])
def test_of_many_that_take_over_one_wins(tmp_path: Path, rounds: int) -> None:
    for number in range(rounds):
        folder = tmp_path / str(number)
        folder.mkdir()
        _leave(folder, _elsewhere(), touched_seconds_ago=90)
        together = threading.Barrier(8)

        def contend(folder: Path, together: threading.Barrier) -> FolderLock | None:
            together.wait()
            with suppress(ConfigError):
                return _hold(folder, Owner("lockstep train"), BELIEVES_CLOCKS)
            return None

        with ThreadPoolExecutor(8) as pool:
            won = [lock for lock in pool.map(contend, [folder] * 8, [together] * 8) if lock]
        assert len(won) == 1
        won[0].confirm()
        won[0].close()
        assert [path.name for path in folder.iterdir()] == [LOCK_FILE]


def test_a_lock_that_another_process_took_over_is_left_alone(tmp_path: Path) -> None:
    path = _leave(tmp_path, Owner("the winner"))
    assert not folder_lock._take_over(path, b"what the winner has replaced", Owner("late"), USUAL)
    assert [each.name for each in tmp_path.iterdir()] == [LOCK_FILE]


def test_a_process_killed_while_taking_over_blocks_no_other(tmp_path: Path) -> None:
    _leave(tmp_path, dataclasses.replace(Owner("lockstep train"), started=1.0))
    turn = tmp_path / ".partial-.lock-turn"
    turn.touch()
    os.utime(turn, (1, 1))
    _hold(tmp_path, Owner("lockstep train")).close()
    assert not list(tmp_path.iterdir())


def test_a_holder_that_lost_the_folder_removes_nothing(tmp_path: Path) -> None:
    lock = _hold(tmp_path, Owner("lockstep train"))
    lock.confirm()
    path = _leave(tmp_path, _elsewhere(job="Slurm job 8"))
    with pytest.raises(LockstepError, match=r"now held by lockstep train \(Slurm job 8\), process \d+ on far"):
        lock.confirm()
    with pytest.raises(LockstepError, match="now held"):
        lock.check()
    lock.close()
    assert path.exists()


def test_a_check_reads_the_lock_if_the_heartbeat_stopped(tmp_path: Path) -> None:
    seconds = [0.0]
    lock = _hold(tmp_path, Owner("lockstep train"), LockTimes(beat=1000.0, now=lambda: seconds[0]))
    _leave(tmp_path, _elsewhere())
    lock.check()  # confirmed not long ago
    seconds[0] = 2001.0
    with pytest.raises(LockstepError, match="now held"):
        lock.check()
    lock.close()


def test_a_successor_leaves_a_mark_for_the_suspended_holder(tmp_path: Path) -> None:
    first = _hold(tmp_path, _elsewhere())
    os.utime(tmp_path / LOCK_FILE, (1, 1))
    for _ in range(2):
        _hold(tmp_path, Owner("lockstep train"), BELIEVES_CLOCKS).close()
        with pytest.raises(LockstepError, match="now held by lockstep train"):
            first.confirm()
    first.close()
    assert (tmp_path / LOCK_FILE).exists()


def test_a_lock_that_was_removed_comes_back(tmp_path: Path) -> None:
    lock = _hold(tmp_path, Owner("lockstep train"))
    (tmp_path / LOCK_FILE).unlink()
    lock.confirm()
    assert (tmp_path / LOCK_FILE).exists()
    lock.close()


def test_a_holder_gives_signs(tmp_path: Path) -> None:
    lock = _hold(tmp_path, Owner("lockstep train"), LockTimes(beat=0.01))
    os.utime(tmp_path / LOCK_FILE, (1, 1))
    while (tmp_path / LOCK_FILE).stat().st_mtime < 2:
        time.sleep(0.01)
    lock.close()
