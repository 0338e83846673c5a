"""Checks of whole commands, several at a time: `lockstep train` at each precision, compiled, studies, the doctor."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import psutil
from PIL import Image

from gpu.checking import Skip, tell
from gpu.device import CHOICE, DEVICE, ON_CUDA, ON_GPU, size
from lockstep.files.jsonl import read_records
from lockstep.world import accelerator

AT_A_TIME = size(6, 2)
MAX_SECONDS = 240.0
NO_COMPILER = ("Failed to find C compiler", "Python.h: No such file")
# They share a CUDA device; elsewhere each has its own.
TWO_WORKERS = ("-np", "2", *(("--dist-backend", "gloo") if ON_CUDA or not ON_GPU else ()))
UNTRACKED = () if find_spec("tensorboard") else ("--track",)  # an image may lack it


def lockstep(*words: str, folder: Path, code: int | None = 0) -> str:
    """Run a command in a folder; return its output. If `code` is None, any exit code is accepted.

    Raises:
        AssertionError: It exited with another code, or timed out.
    """
    command = [sys.executable, "-m", "lockstep", *words]
    try:
        done = subprocess.run(
            command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=MAX_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise AssertionError(f"lockstep {' '.join(words)}: no end in {MAX_SECONDS:.0f} s") from None
    if code is not None and done.returncode != code:
        raise AssertionError(f"lockstep {' '.join(words)} ended with {done.returncode}: …{done.stdout[-1500:]}")
    return done.stdout


def accuracy(run: Path, split: str = "val") -> float:
    """Return the top-1 of the last epoch on a split."""
    epochs = [row for row in read_records(run / "metrics.jsonl") if row["kind"] == "epoch" and row["split"] == split]
    return float(epochs[-1]["top1"])


def train(*words: str, folder: Path, at_least: float = 0.8) -> None:
    """Train the digits for three epochs.

    Raises:
        Skip: torch.compile needs a C compiler and Python's headers, which are missing.
    """
    common = ("--device", CHOICE, "--epochs", "3", "--run-dir", "run")
    try:
        lockstep("train", "digits", *UNTRACKED, *common, *words, folder=folder)
    except AssertionError as error:
        if missing := next((words for words in NO_COMPILER if words in str(error)), ""):
            raise Skip(f"{missing}: torch.compile cannot work here") from None
        raise
    assert accuracy(folder / "run") > at_least, accuracy(folder / "run")


def train_resume_evaluate(folder: Path) -> None:
    train("--precision", "bf16", "--channels-last", "--ema-decay", "0.9", folder=folder)
    more = ("--epochs", "4", "--resume", "run", "--precision", "bf16", "--channels-last", "--ema-decay", "0.9")
    lockstep("train", "digits", *UNTRACKED, "--device", CHOICE, *more, folder=folder)
    said = lockstep("eval", "run", "digits", "--device", CHOICE, folder=folder)
    assert "images right" in said, said


def doctor(folder: Path) -> None:
    said = lockstep("doctor", folder=folder, code=None)  # exits with 1 if it finds a problem, such as a small /dev/shm
    assert "Traceback" not in said, said
    if ON_GPU:
        assert accelerator.name().split()[-1] in said, said


def study_scaling(folder: Path) -> None:
    words = ("--steps", "20", "--warmup-steps", "3", "--out", "scaling.jsonl")
    lockstep("study", "scaling", "-np", "1", *words, "--", "digits", "--device", CHOICE, folder=folder)
    rows = [row for row in read_records(folder / "scaling.jsonl") if row["kind"] == "scaling"]
    assert rows
    for row in rows:
        assert row["device"] == DEVICE.type
        assert 0.5 < sum(row["split_seconds"].values()) / row["step_seconds"]["median"] < 2, row


def study_batch_until_memory_ends(folder: Path) -> None:
    words = ("--first", "64", "--steps", "2", "--warmup-steps", "1", "--memory-limit", "6GB", "--out", "batch.jsonl")
    job = ("synthetic", "-a", "resnet50", "--device", "cuda", "--precision", "bf16", "--image-size", "160")
    lockstep("study", "batch", *words, "--", *job, folder=folder)
    rows = [row for row in read_records(folder / "batch.jsonl") if row["kind"] == "batch"]
    fitting = [row for row in rows if row["fits"]]
    assert fitting, rows
    assert len(fitting) < len(rows), "6 GB were enough for every batch"
    assert all(row["peak_memory_bytes"] <= 6e9 for row in fitting), fitting


def two_losses(folder: Path) -> None:
    """Kill a worker twice: the other keeps its process, and with it its context; on CUDA, both share the GPU again."""
    words = (*TWO_WORKERS, "--max-restarts", "3", "--epochs", str(size(40, 12)), "--log-every", "1")
    common = ("--device", CHOICE, "--check-replicas", "1", *UNTRACKED)
    command = [sys.executable, "-m", "lockstep", "train", "digits", *common, *words, "--run-dir", "run"]
    output = folder / "output.txt"
    with output.open("wb") as log, subprocess.Popen(command, cwd=folder, stdout=log, stderr=log) as job:
        stays = None
        for steps in (5, 60):
            workers = _workers_after(steps, folder / "run", job)
            stays = stays or workers[0].pid
            assert workers[0].pid == stays, "the survivor was started again"
            workers[1].kill()
            workers[1].wait(60)
            assert str(workers[1].pid) not in _pids_on_the_gpu(), "the killed worker's memory is still in use"
        code = job.wait(MAX_SECONDS)
    said = output.read_text(errors="replace")
    assert code == 0, said[-1500:]
    assert "restart 2 of 3" in said, said[-1500:]
    assert accuracy(folder / "run") > 0.8, accuracy(folder / "run")


def _steps(run: Path) -> int:
    if not (run / "metrics.jsonl").exists():
        return 0
    return max((row["step"] for row in read_records(run / "metrics.jsonl") if row["kind"] == "step"), default=0)


def _workers(launcher: int) -> dict[int, psutil.Process]:
    """Return the two workers by rank, or nothing if there are fewer."""
    workers = {}
    for process in psutil.Process(launcher).children(recursive=True):
        with suppress(psutil.Error):
            rank, parent = process.environ().get("RANK"), process.parent()
            if rank and parent and "RANK" not in parent.environ():
                workers[int(rank)] = process
    return workers if len(workers) == 2 else {}


def _workers_after(steps: int, run: Path, job: subprocess.Popen[bytes]) -> dict[int, psutil.Process]:
    """Wait until more steps are recorded, and both workers run; return these."""
    end = time.monotonic() + MAX_SECONDS
    while _steps(run) <= steps or not (workers := _workers(job.pid)):
        assert job.poll() is None, f"the job has ended with {job.returncode}"
        assert time.monotonic() < end, "the job makes no progress"
        time.sleep(0.1)
    return workers


def _pids_on_the_gpu() -> list[str]:
    if not shutil.which("nvidia-smi"):
        return []
    words = ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()


def more_workers_than_gpus_are_refused(folder: Path) -> None:
    workers = str(accelerator.count() + 1)
    words = ("train", "digits", "-np", workers, "--device", CHOICE, "--max-steps", "2", "--run-dir", "run")
    said = lockstep(*words, folder=folder, code=3)
    assert "--dist-backend gloo" in said, said


def decode_on_the_gpu(folder: Path) -> None:
    generator = np.random.default_rng(0)
    for split, count in (("train", 60), ("val", 10)):
        for name, channel in (("blue", 2), ("red", 0)):
            path = folder / "images" / split / name
            path.mkdir(parents=True)
            for number in range(count):
                pixels = generator.integers(0, 120, (96 + number % 5, 128, 3), dtype=np.uint8)
                pixels[:, :, channel] += 100
                Image.fromarray(pixels).save(path / f"{number:03d}.jpg", quality=90)
    flags = ("--device", "cuda", "--decode", "gpu", "--in-memory", "never", "--image-size", "64", "-j", "2")
    words = (
        "-a",
        "resnet18",
        "--epochs",
        "3",
        "--warmup-epochs",
        "0",
        "-b",
        "20",
        "--lr",
        "0.02",
        "--lr-scaling",
        "none",
        "--run-dir",
        "run",
        *flags,
    )
    try:
        lockstep("train", "images", *UNTRACKED, *words, folder=folder)
    except AssertionError as error:
        if "nvjpeg" in str(error).lower():
            raise Skip(str(error)[-300:]) from None
        raise
    # Not of the evaluation: 18 steps are too few for batch norm's averages, and the CPU decodes its images.
    assert accuracy(folder / "run", "train") > 0.95


def cases() -> Iterator[tuple[str, Callable[[Path], None]]]:
    """Return the checks by name, the longest-running first."""

    def trained(*words: str, at_least: float = 0.8) -> Callable[[Path], None]:
        return lambda folder: train(*words, folder=folder, at_least=at_least)

    if ON_GPU:
        compiled = trained("--compile", "--precision", "bf16", "--channels-last")
        yield "train_compiled_in_bf16_channels_last", _with_cuda(compiled)
        yield "study_batch_until_memory_ends", _with_cuda(study_batch_until_memory_ends)
        yield "train_two_workers", trained(*TWO_WORKERS)
        yield "train_two_workers_by_horovod", trained(*TWO_WORKERS, "--strategy", "horovod")
        yield "train_compiled_by_two", _with_cuda(trained("--compile", *TWO_WORKERS, "--precision", "O1"))
        for level in ("O0", "O1", "O2", "O3"):
            optimizer = ("--optimizer", "sgd", "--lr", "0.05") if level == "O3" else ()
            yield f"train_{level}", trained("--precision", level, *optimizer, at_least=0.6)
        yield "train_by_dataparallel", _with_cuda(trained("--strategy", "dp"))
        yield "decode_on_the_gpu", _with_cuda(decode_on_the_gpu)
        yield "more_workers_than_gpus_are_refused", more_workers_than_gpus_are_refused
        yield "study_scaling", study_scaling
    yield "two_losses", two_losses
    yield "train_resume_evaluate", train_resume_evaluate
    yield "doctor", doctor


def _with_cuda(check: Callable[[Path], None]) -> Callable[[Path], None]:
    def skip(_: Path) -> None:
        raise Skip("needs CUDA")

    return check if ON_CUDA else skip


def _run(name: str, check: Callable[[Path], None]) -> bool:
    start, status, why = time.monotonic(), "passed", ""
    with tempfile.TemporaryDirectory() as folder:
        try:
            check(Path(folder))
        except Skip as reason:
            status, why = "skipped", str(reason)
        except Exception as error:
            status, why = "failed", f"{type(error).__name__}: {error}"
    tell(name, status, why, time.monotonic() - start)
    return status != "failed"


def main() -> int:
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        done = [pool.submit(partial(_run, name, check)) for name, check in cases()]
    return 0 if all(each.result() for each in done) else 1
