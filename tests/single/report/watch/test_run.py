"""Finding a run, following its files, and judging how it is."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest

from lockstep.errors import ConfigError
from lockstep.files.jsonl import keep_records
from lockstep.report.watch.run import MAX_WORKERS, FollowedFile, RunWatch, duration, find_run, find_worker, last_error

START = 1_700_000_000.0
NewRun = Callable[[int], Path]
Write = Callable[..., None]


def test_run_without_signs_of_life_is_silent(new_run: NewRun) -> None:
    watch = RunWatch(new_run(2))  # the last record is one of I/O, 60 s after the start
    state = watch.look(START + 70).state
    assert (state.condition, state.text) == ("running", "running, last activity 10 s ago")
    state = watch.look(START + 60 + 3 * 3600).state
    assert state.condition == "silent"
    assert state.text.startswith("last activity 3 h 0 min ago")


@pytest.mark.parametrize("has_io", [False, True])
def test_silence_may_last_an_evaluation(has_io: bool, new_run: NewRun, write: Write) -> None:
    run = new_run(1)
    for path in (run / "io").iterdir() if not has_io else [run / "config.yaml"]:  # which has their interval
        path.unlink()
    write(run / "metrics.jsonl", [{"kind": "epoch", "time_seconds": 1.0, "step": 10, "unix_time": START + 1010}], "a")
    watch = RunWatch(run)
    assert watch.look(START + 1010 + 2000).state.condition == "running"
    assert watch.look(START + 1010 + 4000).state.condition == "silent"


def test_run_with_live_workers_but_no_steps_is_reported(new_run: NewRun, write: Write) -> None:
    run = new_run(2)  # its last step is recorded 20 s after the start
    records = [{"kind": "io", "rank": 0, "unix_time": START + time} for time in (80, 200)]
    write(run / "io" / "worker-0.jsonl", records[:1], "a")
    watch = RunWatch(run)
    assert watch.look(START + 80).state.condition == "running"
    write(run / "io" / "worker-0.jsonl", records[1:], "a")
    state = watch.look(START + 200).state
    assert state.condition == "silent"
    assert state.text == "no step recorded for 3 min 0 s, but workers are active: long evaluation or hang"


@pytest.mark.parametrize(
    ("epochs", "last", "condition", "words"),
    [
        (4, {}, "finished", "finished"),
        (
            2,
            {"kind": "stop", "step": 20, "reason": "SIGUSR1"},
            "stopped",
            "stopped by SIGUSR1; to continue, use `--resume auto`",
        ),
        (2, {"kind": "desired", "step": 20, "desired_acc": 0.2}, "finished", "desired accuracy 20 % reached"),
    ],
)
def test_end_of_a_run_is_shown(
    new_run: NewRun, write: Write, epochs: int, last: dict[str, object], condition: str, words: str
) -> None:
    run = new_run(epochs)
    write(run / "metrics.jsonl", [last], "a")
    state = RunWatch(run).look(START + 1e6).state
    assert (state.condition, state.text) == (condition, words)


def test_the_worker_that_failed_is_named_not_those_that_lost_it(new_run: NewRun) -> None:
    run = new_run(2)
    for rank, error in enumerate(("RuntimeError: Connection closed by peer", "DataError: image 7 is broken")):
        (run / "logs" / f"worker-{rank}.log").write_text(f"2026-01-01 00:00:01,001 worker {rank} ERROR x\n{error}\n")
    state = RunWatch(run).look(START + 70).state
    assert (state.condition, state.text) == ("failed", "worker 1 failed: DataError: image 7 is broken")


def test_a_run_that_begins_is_waited_for(tmp_path: Path, new_run: NewRun) -> None:
    run = tmp_path / "early"
    (run / "logs").mkdir(parents=True)
    (run / "config.yaml").write_text("epochs: [")
    watch = RunWatch(run)
    assert watch.look(START).state.condition == "waiting"
    (run / "config.yaml").write_text("epochs: 4\n")
    (run / "metrics.jsonl").write_bytes((new_run(2) / "metrics.jsonl").read_bytes())
    snapshot = watch.look(START + 30)
    assert (snapshot.state.condition, snapshot.metrics.last_step) == ("running", 40)
    assert [worker.rank for worker in snapshot.workers] == [0, 1]


def test_a_configuration_nested_too_deeply_counts_as_none(new_run: NewRun) -> None:
    run = new_run(2)
    (run / "config.yaml").write_text("[" * 100_000)
    snapshot = RunWatch(run).look(START + 70)
    assert snapshot.config == {}
    assert snapshot.state.condition == "running"


@pytest.mark.parametrize(("workers", "looked_at"), [(10**9, MAX_WORKERS), (True, 2), (-1, 2), ("x", 2), (3, 3)])
def test_a_record_with_a_wrong_number_of_workers_hangs_nothing(
    new_run: NewRun, write: Write, workers: object, looked_at: int
) -> None:
    run = new_run(2)
    write(run / "metrics.jsonl", [{"kind": "run", "workers": workers}], "a")
    assert len(RunWatch(run).look(START + 70).workers) == looked_at


def test_a_log_with_a_wrong_name_hangs_nothing(new_run: NewRun) -> None:
    run = new_run(2)
    (run / "metrics.jsonl").unlink()
    (run / "logs" / "worker-1000000000.log").touch()
    assert len(RunWatch(run).look(START + 70).workers) == MAX_WORKERS


def test_resumed_run_is_seen_as_if_read_for_the_first_time(new_run: NewRun, write: Write) -> None:
    run = new_run(2)
    watch = RunWatch(run)
    watch.look(START)
    text = (run / "metrics.jsonl").read_text()
    (run / "new").write_text("".join(line for line in text.splitlines(True) if '"step": 2' not in line))
    (run / "new").replace(run / "metrics.jsonl")
    seen, fresh = watch.look(START + 70).metrics, RunWatch(run).look(START + 70).metrics
    assert seen.step == fresh.step == 15
    for figure, split in product(("loss", "top1"), ("train", "val")):
        assert seen.curve(figure, split) == fresh.curve(figure, split) != []


def test_last_and_best_checkpoints_are_found(new_run: NewRun) -> None:
    run = new_run(3)
    for step in (10, 20, 30):
        folder = run / "checkpoints" / f"step-{step:08}"
        folder.mkdir()
        (folder / "manifest.json").touch()
        os.utime(folder, (START + step, START + step))
    for name in (".partial-step-00000040", "step-00000050", "step-x"):  # none of them is complete
        (run / "checkpoints" / name).mkdir()
    (run / "checkpoints" / "best").symlink_to("step-00000020")
    found = RunWatch(run).look(START + 100).checkpoints
    assert found == {"last": (30, START + 30), "best": (20, START + 20)}
    shutil.rmtree(run / "checkpoints" / "step-00000020")
    assert "best" not in RunWatch(run).look(START + 100).checkpoints
    (run / "checkpoints" / "best").unlink()
    (run / "checkpoints" / "best").symlink_to("best")
    assert "best" not in RunWatch(run).look(START + 100).checkpoints


def test_without_a_name_the_newest_run_is_found(
    tmp_path: Path, new_run: NewRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = tmp_path / "project"
    project.mkdir()
    monkeypatch.chdir(project)
    with pytest.raises(ConfigError, match=r"no runs in runs/; pass a run folder.* other jobs, use `lockstep stacks`"):
        find_run(None)
    run = new_run(1)
    for number, name in enumerate(("old", "new", "no-run-but-newest")):
        (project / "runs" / name).mkdir(parents=True)
        if not name.startswith("no-"):
            copy = project / "runs" / name / "metrics.jsonl"
            copy.write_bytes((run / "metrics.jsonl").read_bytes())
            os.utime(copy, (START + number, START + number))
    assert find_run(None) == find_run(Path("runs")) == find_run(Path(".")) == Path("runs/new")
    assert find_run(Path("runs/old")) == Path("runs/old")


def test_folder_without_a_run_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such folder"):
        find_run(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"no run found; .*`lockstep train`, .* use `lockstep stacks`"):
        find_run(tmp_path)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (-3, "0 s"),
        (59.4, "59 s"),
        (60, "1 min 0 s"),
        (725, "12 min"),
        (3600, "1 h 0 min"),
        (47 * 3600, "47 h 0 min"),
        (50 * 3600, "2 d 2 h"),
    ],
)
def test_times_have_two_units(seconds: float, words: str) -> None:
    assert duration(seconds) == words


def test_each_record_is_read_once_as_soon_as_it_is_whole(tmp_path: Path, write: Write) -> None:
    path = tmp_path / "metrics.jsonl"
    follower = FollowedFile(path)
    assert follower.read().records == []  # there is no file yet
    write(path, [{"step": 1}])
    assert follower.read() == ([{"step": 1}], True, False)
    with path.open("a") as file:
        file.write('{"step": 2}\n{"st')
    assert follower.read() == ([{"step": 2}], False, False)
    assert follower.read().records == []
    with path.open("a") as file:
        file.write('ep": 3}\n')
    assert follower.read().records == [{"step": 3}]


def test_invalid_record_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(
        b'{"step": 1}\n{"step": 2, "lo{"step": 3}\n\xff\xfe\n[4]\n5\n\n' + b"[" * 100_000 + b'\n{"step": 6}\n'
    )
    assert FollowedFile(path).read().records == [{"step": 1}, {"step": 6}]


def test_a_file_that_a_resume_rewrote_is_read_from_its_start(tmp_path: Path, write: Write) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, [{"step": step} for step in range(5)])
    follower = FollowedFile(path)
    follower.read()
    keep_records(path, lambda record: record["step"] < 3)
    write(path, [{"step": 3, "again": True, "longer": "than before " * 20}], "a")
    news = follower.read()
    assert news.is_new
    assert [record["step"] for record in news.records] == [0, 1, 2, 3]
    assert "again" in news.records[3]


def test_a_file_that_was_cut_is_read_from_its_start(tmp_path: Path, write: Write) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, [{"step": step} for step in range(5)])
    follower = FollowedFile(path)
    follower.read()
    with path.open("r+") as file:
        file.truncate(len('{"step": 0}\n'))
    assert follower.read() == ([{"step": 0}], True, False)


def test_a_long_file_comes_in_portions(tmp_path: Path, write: Write) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, [{"step": step} for step in range(10, 40)])
    follower = FollowedFile(path)
    steps, has_more = [], True
    while has_more:
        records, _, has_more = follower.read(most_bytes=100)
        assert len(records) < 10
        steps += [record["step"] for record in records]
    assert steps == list(range(10, 40))


INFO = b"2026-01-01 00:00:00,001 worker 1 INFO hello\n"
ERROR = b"""2026-01-01 00:00:01,001 worker 1 ERROR Traceback (most recent call last):
  File "x.py", line 1, in f
    raise DataError("image 7 is broken")
lockstep.errors.DataError: image 7 is broken
"""


def test_the_error_at_a_logs_end_is_its_failure() -> None:
    assert last_error(INFO + ERROR) == "DataError: image 7 is broken"
    assert last_error(ERROR + INFO) == ""  # a later session has gone on
    assert last_error(INFO) == last_error(b"") == ""
    assert last_error(ERROR[60:]) == "DataError: image 7 is broken"  # the beginning is too long ago
    assert last_error(INFO + b"2026-01-01 00:00:01,001 worker 1 ERROR out of luck\n") == "out of luck"


def test_a_worker_is_known_by_the_ends_of_its_files(new_run: NewRun, write: Write) -> None:
    run = new_run(1)
    assert find_worker(run, 1) == (before := find_worker(run, 1))
    assert (before.rank, before.last_time, before.read_rate, before.failure) == (1, START + 60, 2e6, "")
    io = [{"kind": "io"}, {"kind": "io", "unix_time": START + 65, "seconds": 5, "read_bytes": 50}]
    write(run / "io" / "worker-1.jsonl", [{"kind": "other", "unix_time": number} for number in range(1000)] + io, "a")
    (run / "logs" / "worker-1.log").write_bytes(INFO * 1000 + ERROR)
    worker = find_worker(run, 1)
    assert (worker.last_time, worker.read_rate) == (START + 65, 10)
    assert worker.failure == "DataError: image 7 is broken"


def test_io_records_that_hold_nonsense_are_passed_over(new_run: NewRun, write: Write, nonsense: object) -> None:
    run = new_run(1)
    good = {"kind": "io", "unix_time": 1e9, "seconds": 5.0, "read_bytes": 50}
    for odd in [*(good | {name: nonsense} for name in good), dict.fromkeys(good, nonsense) | {"kind": "io"}]:
        write(run / "io" / "worker-0.jsonl", [good, odd])
        worker = find_worker(run, 0)
        assert worker.last_time is not None
        assert worker.read_rate is None or abs(worker.read_rate) <= 1e100


def test_a_worker_without_files_is_nothing_to_fail_over(tmp_path: Path) -> None:
    worker = find_worker(tmp_path, 0)
    assert (worker.last_time, worker.read_rate, worker.failure) == (None, None, "")


def test_an_error_that_follows_from_a_lost_peer_is_known(new_run: Callable[[int], Path]) -> None:
    run = new_run(1)
    log = run / "logs" / "worker-0.log"
    log.write_bytes(ERROR.replace(b"image 7 is broken", b"Connection closed by peer"))
    assert find_worker(run, 0).has_lost_peer
    assert not find_worker(run, 1).has_lost_peer
