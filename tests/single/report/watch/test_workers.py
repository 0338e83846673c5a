"""What a worker's files say of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from lockstep.report.watch.run import WorkerFiles, last_error

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


def test_a_worker_is_followed(new_run: Callable[[int], Path], write: Callable[..., None]) -> None:
    run = new_run(1)
    files = WorkerFiles(run, 1)
    worker = files.look()
    assert (list(worker.read_rates), worker.failure) == ([2e6], "")
    before = worker.last_time
    assert before is not None
    write(
        run / "io" / "worker-1.jsonl",
        [{"kind": "io"}, {"kind": "io", "unix_time": before + 5, "seconds": 5, "read_bytes": 50}],
        "a",
    )
    (run / "logs" / "worker-1.log").write_bytes(INFO + ERROR)
    worker = files.look()
    assert (worker.last_time, list(worker.read_rates)) == (before + 5, [2e6, 10])
    assert worker.failure == "DataError: image 7 is broken"
    assert worker.log_bytes == len(INFO + ERROR)


def test_io_records_that_hold_nonsense_are_passed_over(
    new_run: Callable[[int], Path], write: Callable[..., None], nonsense: object
) -> None:
    run = new_run(1)
    good = {"kind": "io", "unix_time": 1e9, "seconds": 5.0, "read_bytes": 50}
    odd = [good | {name: nonsense} for name in good] + [dict.fromkeys(good, nonsense) | {"kind": "io"}]
    write(run / "io" / "worker-0.jsonl", [*odd, good])
    worker = WorkerFiles(run, 0).look()
    assert worker.last_time == 1e9
    assert worker.read_rates[-1] == 10
    assert all(abs(rate) <= 1e100 for rate in worker.read_rates)


def test_a_rate_needs_a_length_of_time(new_run: Callable[[int], Path], write: Callable[..., None]) -> None:
    run = new_run(1)
    io = [{"kind": "io", "unix_time": 1e9, "seconds": seconds, "read_bytes": 50} for seconds in (0, -5.0)]
    write(run / "io" / "worker-0.jsonl", io)
    assert not WorkerFiles(run, 0).look().read_rates


def test_a_worker_without_files_is_nothing_to_fail_over(tmp_path: Path) -> None:
    worker = WorkerFiles(tmp_path, 0).look()
    assert (worker.last_time, worker.log_bytes, worker.failure) == (None, None, "")


def test_an_error_that_follows_from_a_lost_peer_is_known(new_run: Callable[[int], Path]) -> None:
    run = new_run(1)
    log = run / "logs" / "worker-0.log"
    log.write_bytes(ERROR.replace(b"image 7 is broken", b"Connection closed by peer"))
    assert WorkerFiles(run, 0).look().has_lost_peer
    assert not WorkerFiles(run, 1).look().has_lost_peer
