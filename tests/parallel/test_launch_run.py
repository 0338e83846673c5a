"""lockstep.launch.run: a function on several workers, from a program and from a notebook."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from calls import in_a_program

from lockstep.errors import ConfigError, WorkerFailedError
from lockstep.launch import run


def test_results_come_by_rank_and_fit_finds_the_other_workers(tmp_path: Path) -> None:
    def train(seed: int, *, epochs: int) -> tuple[int, int, float, Any]:
        import torch
        from torch import nn
        from torch.utils.data import TensorDataset

        from lockstep.train import fit

        images = torch.randn(96, 1, 4, 4, generator=torch.Generator().manual_seed(seed))
        labels = (images.mean((1, 2, 3)) > 0).long()
        train_set, val_set = TensorDataset(images[:64], labels[:64]), TensorDataset(images[64:], labels[64:])
        torch.manual_seed(int(os.environ["RANK"]))  # the model of worker 0 is that of all
        model = nn.Sequential(nn.Flatten(), nn.Linear(16, 2))
        result = fit(model, train_set, val_set, batch_size=8, epochs=epochs, track=())
        return int(os.environ["RANK"]), result.steps, result.loss, result.history.val["loss"]

    (rank0, steps, loss, losses), second = in_a_program(tmp_path, lambda: run(train, (1,), {"epochs": 2}, np=2))
    assert (rank0, steps) == (0, 8)
    assert losses[-1] == loss
    assert second[0] == 1
    assert list(second[3]) == list(losses)


def test_an_error_comes_back_with_its_worker_and_traceback(tmp_path: Path) -> None:
    def fail() -> None:
        if os.environ["RANK"] == "1":
            raise KeyError("no such thing")
        signal.pause()

    with pytest.raises(WorkerFailedError, match=r"^worker 1 failed:\nTraceback[^$]*KeyError: 'no such thing'$"):
        in_a_program(tmp_path, lambda: run(fail, np=2))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: run(print, np=0), "np=0: must be at least 1, or"),
        (lambda: run(print, np="two"), "np='two': must be at least 1"),  # type: ignore[arg-type]
        (lambda: run(print(), np=2), "None is not a function; pass the function itself"),  # type: ignore
        (
            lambda: run(print, (threading.Lock(),)),
            "cannot be pickled for the workers: .*lock.*; create such objects inside",
        ),
    ],
)
def test_arguments_that_cannot_be_are_named(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        call()
