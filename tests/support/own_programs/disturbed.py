"""Run a program of own_programs that sends itself a signal: `disturbed.py PROGRAM ARGUMENTS`.

OWN_SIGNAL: RANK:CALL:SIGNAL, of which worker, after which call of an optimizer's `step`, from 1, and which signal; not
in workers that were restarted.
OWN_LINE: RANK:COUNT:SIGNAL, the same after so many executed lines of the program, wherever it is then.
OWN_SAMPLES: a folder, to which each worker appends the numbers of the samples of each step.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

from lockstep.data.seeded_samples import Request, SeededSet
from lockstep.run import stopping
from lockstep.run.training_run import TrainingRun


def send_signal(rank: str, call: str, name: str) -> None:
    calls = 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == int(call):
            os.kill(os.getpid(), signal.Signals[name])

    if os.environ["RANK"] == rank:
        register_optimizer_step_post_hook(count)


def send_signal_at_line(rank: str, count: str, name: str) -> None:
    lines = 0

    def follow(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        if event == "line" and lines == int(count):
            os.kill(os.getpid(), signal.Signals[name])
        return follow

    if os.environ["RANK"] == rank:
        sys.settrace(lambda frame, *_: follow if frame.f_code.co_filename == sys.argv[0] else None)


def note_samples(folder: Path) -> None:
    read, step, samples = SeededSet.__getitems__, TrainingRun.step, list[int]()

    def reading(self: SeededSet, request: Request) -> Any:
        samples.extend(request.samples)
        return read(self, request)

    def stepping(self: TrainingRun, *arguments: Any, **figures: Any) -> None:
        step(self, *arguments, **figures)
        with (folder / os.environ["RANK"]).open("a") as file:
            print(self.step_count, *samples, file=file)
        samples.clear()

    SeededSet.__getitems__, TrainingRun.step = reading, stepping  # type: ignore[method-assign]


stopping.APART_SECONDS = 0.0  # so that workers agree after each step: these programs have few
if (order := os.environ.get("OWN_SIGNAL")) and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
    send_signal(*order.split(":"))
if folder := os.environ.get("OWN_SAMPLES"):
    note_samples(Path(folder))
sys.argv = sys.argv[1:]
sys.path[0] = str(Path(sys.argv[0]).parent)
if order := os.environ.get("OWN_LINE"):
    send_signal_at_line(*order.split(":"))
runpy.run_path(sys.argv[0], run_name="__main__")
