"""A check of `lockstep doctor`: all-reduces among the GPUs of this machine, for two seconds.

The usual first faults of a GPU job are there: direct access between GPUs that hangs or loses data (IOMMU, PCIe ACS),
little shared memory, or a GPU that another program holds. One process per GPU takes part, and ends itself if the GPUs
do not answer. If the trial fails, another one without direct access shows whether a job can work around the fault.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, TypeVar

from lockstep.errors import first_line
from lockstep.launch.nccl_log import LINE
from lockstep.world import accelerator
from lockstep.world.rendezvous import exchange

if TYPE_CHECKING:
    from torch.distributed import Store

COMMAND = (sys.executable, "-P", "-m", "lockstep.launch.gpus_doctor")
START_SECONDS = 300.0  # for the slowest process to import torch
LIMIT_SECONDS = 30.0  # connecting takes up to 10 s
WARM_UP_ROUNDS = 3
NO_ANSWER = "no answer within {:g} s"
T = TypeVar("T")


@dataclass(frozen=True)
class Trial:
    """All-reduces of `size_bytes` for `seconds`, given up after `limit_seconds`."""

    size_bytes: int = 64 << 20
    seconds: float = 2.0
    limit_seconds: float = LIMIT_SECONDS


def try_gpus(command: Sequence[str] = COMMAND) -> tuple[str, str] | None:
    """Try all GPUs of this machine together; return what was found and, if they fail, the fix.

    None if there are fewer than two, or torch has no collectives for them. This process does not use a GPU.

    Args:
        command: Runs `main` in one process per GPU.
    """
    kind, count = accelerator.kind(), accelerator.count()
    if kind is None or count < 2 or not accelerator.has_collectives(kind):
        return None
    library = accelerator.backend(kind)
    found, error = _run(command, count, {})
    if not error:
        return f"{library}: {found}", ""
    fails = f"{library}: all-reduces fail"
    switch = accelerator.WITHOUT_DIRECT_ACCESS.get(library, {})
    name = " ".join(f"{key}={value}" for key, value in switch.items())
    if switch and not _run(command, count, switch)[1]:
        return fails, (
            f"{error}; works with {name}: set it for jobs here until direct access between the GPUs works (check PCIe "
            f"ACS and IOMMU in the firmware, and the driver)"
        )
    also = f", also with {name}" if switch else ""
    return fails, f"{error}{also}; check what else uses the GPUs, and the driver's messages (dmesg)"


def _run(command: Sequence[str], count: int, variables: Mapping[str, str]) -> tuple[str, str]:
    """Run a trial with these variables; return its description and the error, one of which is ""."""
    with TemporaryDirectory() as folder:
        own = {"NCCL_DEBUG": "WARN", "NCCL_DEBUG_FILE": f"{folder}/log.%p", "OMP_NUM_THREADS": "1"}
        environment = {**os.environ, **own, **variables}
        workers = [
            subprocess.Popen(
                [*command, folder, str(rank), str(count)], env=environment, stdout=subprocess.PIPE, text=True
            )
            for rank in range(count)
        ]
        results = [_result(worker) for worker in workers]
        errors = sorted((error for _, error in results if error), key=lambda error: error.startswith(NO_ANSWER[:9]))
        if not errors:
            return results[0]
        text = "\n".join(path.read_text(errors="replace") for path in Path(folder).glob("log.*"))
        warnings = [found["text"] for found in LINE.finditer(text) if found["text"] not in errors[0]]
        return "", ": ".join([errors[0], *warnings[:1]])


def _result(worker: subprocess.Popen[str]) -> tuple[str, str]:
    """Return what a worker reports: a description of the trial, and the error."""
    try:
        output = worker.communicate(timeout=START_SECONDS + 2 * LIMIT_SECONDS)[0]
        found, error = json.loads(output.splitlines()[-1])
    except subprocess.TimeoutExpired:
        worker.kill()
        return "", NO_ANSWER.format(START_SECONDS + 2 * LIMIT_SECONDS)
    except (ValueError, IndexError):
        return "", f"a trial process exited with code {worker.wait()}"
    return str(found), str(error)


def reduce_together(store: Store, rank: int, size: int, trial: Trial = Trial()) -> tuple[str, str]:
    """Take part in a trial as one of `size` processes; return its description and the error, one of which is ""."""
    exchange(store, rank, size, None, "ready")
    found = within(trial.limit_seconds, lambda: _reduce(store, rank, size, trial))
    return found or ("", NO_ANSWER.format(trial.limit_seconds))


def within(seconds: float, work: Callable[[], T]) -> T | None:
    """Return what the work returns; None if it takes longer, because a GPU's library hangs."""
    found: list[T] = []
    thread = threading.Thread(target=lambda: found.append(work()), daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else None


def _reduce(store: Store, rank: int, size: int, trial: Trial) -> tuple[str, str]:
    import torch

    device = torch.device(accelerator.kind() or "cpu", rank)
    try:
        accelerator.use(device)
        cards = exchange(store, rank, size, accelerator.card(device), "card")
        if len({*cards}) < size:
            return "not tried, because some of these devices are parts of one card", ""
        group = accelerator.group(store, rank, size, device, timedelta(seconds=2 * trial.limit_seconds))
        tensor = torch.empty(trial.size_bytes // 4, device=device)
        wrong = torch.zeros((), dtype=torch.bool, device=device)

        def run(rounds: int) -> float:
            start = time.perf_counter()
            for _ in range(rounds):
                tensor.fill_(1)
                group.allreduce([tensor]).wait()
                wrong.logical_or_((tensor != size).any())
            accelerator.synchronize(device)
            return (time.perf_counter() - start) / rounds

        run(WARM_UP_ROUNDS)
        seconds = max(exchange(store, rank, size, run(WARM_UP_ROUNDS), "seconds"))
        seconds = run(max(1, int(trial.seconds / seconds)))
        is_wrong = any(exchange(store, rank, size, bool(wrong), "wrong"))
    except Exception as error:  # of the device, its library or the store
        return "", first_line(error)
    if is_wrong:
        return "", "all-reduces give wrong sums"
    rate = 2 * (size - 1) / size * trial.size_bytes / seconds
    return f"{size} GPUs, all-reduce at {rate / 1e9:.1f} GB/s or more", ""


def main(trial: Trial = Trial()) -> None:
    from torch.distributed import FileStore

    folder, rank, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    store = FileStore(f"{folder}/store", size)
    store.set_timeout(timedelta(seconds=START_SECONDS))
    print(json.dumps(reduce_together(store, rank, size, trial)), flush=True)
    os._exit(0)  # without waiting for a group that hangs


if __name__ == "__main__":
    main()
