"""I/O over time: what is counted, and what a run keeps of it."""

from __future__ import annotations

import multiprocessing
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep.cli import main
from lockstep.files.io_records import job_io, worker_file
from lockstep.files.io_totals import OF_NODE, IoTotals
from lockstep.files.jsonl import read_records
from lockstep.observe import io_sampling
from lockstep.observe.io_sampling import MISSING, IoCounters, IoSampler

linux = pytest.mark.skipif(sys.platform != "linux", reason="other systems do not count the I/O of processes")
SIZE = 3_000_000


@pytest.fixture
def large_file(tmp_path: Path) -> Path:
    path = tmp_path / "large"
    path.write_bytes(bytes(SIZE))
    return path


@linux
def test_counting_itself_does_not_count() -> None:
    counting = multiprocessing.get_context("fork").Process(
        target=_count_nothing
    )  # it has no thread that reads, no child
    counting.start()
    counting.join()
    assert counting.exitcode == 0


def _count_nothing() -> None:
    counters = IoCounters(node=True)
    for _ in range(10):
        amounts = counters.take()
        assert amounts["read_operations"] < 10
        assert amounts["read_bytes"] < 2000


@linux
def test_reads_of_children_count_once_after_they_exit(large_file: Path) -> None:
    counters = IoCounters()
    large_file.read_bytes()
    mine = counters.take()
    assert SIZE <= mine["read_bytes"] < 1.01 * SIZE
    assert 1 <= mine["read_operations"] < 20
    context = multiprocessing.get_context("fork")
    go_on = context.Event()

    def read_and_wait() -> None:
        large_file.read_bytes()
        go_on.wait()

    child = context.Process(target=read_and_wait)
    child.start()
    total = 0
    while total < SIZE:  # while it lives
        total += counters.take()["read_bytes"]
    go_on.set()
    child.join()
    total += counters.take()["read_bytes"]
    assert total < 1.1 * SIZE
    assert min(counters.take().values()) >= 0


@linux
def test_a_resumed_run_records_the_reads_of_its_loaders(
    tmp_path: Path, new_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    images = new_folder(sizes=((400, 300), (300, 400)))
    train_bytes = sum(path.stat().st_size for path in images.glob("train/*/*.png"))
    val_bytes = sum(path.stat().st_size for path in images.glob("val/*/*.png"))
    words = ["train", str(images), "-a", "cifar-small", "--image-size", "32", "-j", "1", "-b", "10", "--track"]
    words += ["--io-every", "0.2"]
    assert main([*words, "--run-dir", "first", "--max-steps", "1"]) == 0  # imports modules, which is reading, too
    assert main([*words, "--run-dir", "run", "--epochs", "2"]) == 0
    records = list(read_records(worker_file(Path("run"), 0)))
    assert {record["kind"] for record in records} == {"io"}
    expected = 2 * (train_bytes + val_bytes)
    total = sum(record["read_bytes"] for record in records)
    assert expected <= total < 1.5 * expected  # and the checkpoints' checksums
    assert sum(record["read_operations"] for record in records) >= 2 * 50
    assert sum(record["written_bytes"] for record in records) > Path("run/model.safetensors").stat().st_size
    assert all(record[name] >= 0 for record in records for name in record.keys() - {"kind"})
    assert "node_network_received_bytes" in records[0]
    rows = job_io(Path("run"))
    read = sum(row["seconds"] * row["read_bytes_per_second"] for row in rows)
    assert read == pytest.approx(total, rel=1e-3)  # both factors are rounded

    assert main([*words, "--resume", "run", "--epochs", "3"]) == 0
    later = list(read_records(worker_file(Path("run"), 0)))
    assert later[: len(records)] == records
    assert len(later) > len(records)


def _not_there(path: Path) -> Counter[str]:
    raise FileNotFoundError(path)


def test_a_platform_without_counters_is_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(io_sampling, "_read", _not_there)
    assert main(["train", "--max-steps", "2", "--run-dir", "run"]) == 0
    assert capsys.readouterr().out.count(MISSING) == 1
    assert not Path("run/io").exists()


@linux
def test_only_the_first_worker_of_a_node_counts_its_devices(tmp_path: Path) -> None:
    for rank in (0, 1):
        with IoSampler(60, counts_node=rank == 0).recording(tmp_path, rank):
            pass
        (record,) = read_records(worker_file(tmp_path, rank))
        assert any(name.startswith(OF_NODE) for name in record) is (rank == 0)


@linux
def test_totals_go_on_until_a_restart(large_file: Path) -> None:
    taken: list[IoTotals] = []
    sampler = IoSampler(60, counts_node=False, use=taken.append)
    for _ in range(3):
        large_file.read_bytes()
        sampler.sample()
    sampler.restart()
    others = threading.enumerate()
    for _ in range(2):  # the thread can start again, for another job of the process
        sampler.start()
        assert [thread.name for thread in threading.enumerate() if thread not in others] == ["lockstep-io"]
        sampler.stop()
        assert not {*threading.enumerate()} - {*others}
    read = [round(totals.amounts[0] / SIZE) for totals in taken]
    assert read == [1, 2, 3, 0, 0]
    assert taken[0].seconds < taken[1].seconds < taken[2].seconds


@linux
def test_records_that_cannot_be_written_do_not_end_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    worker_file(tmp_path, 0).parent.mkdir()
    worker_file(tmp_path, 0).symlink_to("/dev/full")
    with caplog.at_level("WARNING", "lockstep"), IoSampler(60, counts_node=True).recording(tmp_path, rank=0):
        pass
    assert "I/O recording stopped" in caplog.text
