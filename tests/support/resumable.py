"""The users of `lockstep.run`, the trainer and a loop of one's own, on one small task that can be interrupted."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import TensorDataset

from lockstep.data.sets import describe_custom
from lockstep.errors import StoppedError
from lockstep.files.jsonl import read_records
from lockstep.run.connect import TrainingWorld
from lockstep.train.callbacks import Callback, TrainingState
from lockstep.train.custom import CustomParts
from lockstep.train.fit import configure
from lockstep.train.run import run_with
from lockstep.world.generations import HostsChangedError
from lockstep.world.launcher_environment import RankInfo
from lockstep.world.world import World

EPOCHS, STEPS, BATCH = 2, 6, 4  # the last step of an epoch has 2 samples
generator = torch.Generator().manual_seed(0)
TRAIN, VAL = (
    TensorDataset(torch.randn(count, 1, 2, 2, generator=generator), torch.randint(0, 3, (count,), generator=generator))
    for count in (22, 6)
)
Act = Callable[[int], object]  # called with the number of each complete step


class KilledError(Exception):
    """Ends a session as a crash does."""


class LostError(HostsChangedError):
    """The work is interrupted, as by the loss of a peer, and goes on in another generation."""


def network() -> nn.Module:
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(4)
    return nn.Sequential(nn.Conv2d(1, 4, 1), norm, nn.ReLU(), nn.Dropout(0.2), nn.Flatten(), nn.Linear(16, 3))


class _Acting(Callback):
    def __init__(self, act: Act):
        self._act = act

    def on_step_end(self, run: TrainingState) -> None:
        self._act(run.step)


def by_trainer(
    world: World,
    folder: Path,
    act: Act = lambda step: None,
    model: nn.Module | None = None,
    resume: bool | str = True,
    batch: int = BATCH,
    **options: Any,
) -> int:
    """Train as `fit` does; return the number of steps. `resume`: also from another folder."""
    source = ("auto" if resume else None) if isinstance(resume, bool) else resume
    common = {"epochs": EPOCHS, "lr": 0.05, "ema_decay": 0.5, "loader_workers": 0, "io_every": 0, "track": ()}
    config = configure(**{**common, "global_batch_size": batch, "run_dir": folder, "resume": source, **options})
    parts, data = CustomParts(callbacks=[_Acting(act)]), describe_custom("points", TRAIN, VAL, has_loss=False)
    return run_with(config, world, data, model or network(), parts).steps


def by_loop(
    world: World,
    folder: Path,
    act: Act = lambda step: None,
    model: nn.Module | None = None,
    resume: bool = True,
    batch: int = BATCH,
    epochs: int = EPOCHS,
    accumulate: int = 1,
    **options: Any,
) -> int:
    """Train by a loop of one's own; return the number of steps."""
    own = TrainingWorld(world.rank_info, world.device, world.host_group)
    net = own.prepare(model or network())
    optimizer, average = torch.optim.AdamW(net.parameters(), lr=0.01), AveragedModel(net)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=100)
    train = own.loader(TRAIN, global_batch=batch, shuffle=True, accumulate=accumulate)
    state = {"model": net, "optimizer": optimizer, "average": average, "schedule": schedule}
    run = own.run(folder, loader=train, resume=resume, **options, **state)
    with own:
        for _ in run.epochs(epochs):
            net.train()
            for images, labels in train:
                loss = F.cross_entropy(net(images), labels)
                run.backward(loss)
                if train.completes_step:
                    optimizer.step()
                    optimizer.zero_grad()
                    average.update_parameters(net)
                    run.step(loss=loss)
                    schedule.step()
                    act(run.step_count)
            images, labels = VAL.tensors
            with torch.no_grad():
                top1 = float((average.eval()(images.to(world.device)).argmax(1).cpu() == labels).double().mean())
            run.record(top1=top1)
            if top1 > run.extra.get("best", -1.0) and "checkpoint_epochs" not in options:
                run.extra["best"] = top1
                run.save(best=True)
        run.close()
    return run.step_count


USERS: dict[str, Callable[..., int]] = {"trainer": by_trainer, "loop": by_loop}


@dataclass(frozen=True)
class End:
    """How a session ends after a step: by an exception, or by a signal to the worker of a rank."""

    step: int
    error: type[Exception] | None = None
    rank: int = 0

    def acting_on(self, rank: int) -> Act:
        def act(step: int) -> None:
            if step == self.step and self.error is not None:
                raise self.error
            if step == self.step and rank == self.rank:
                os.kill(os.getpid(), signal.SIGTERM)

        return act


def session(world: World, user: str, folder: Path, end: End | None = None, **options: Any) -> str:
    """Run a session; return the message of its stop, or "" if it was complete or ended by the exception."""
    act = end.acting_on(world.rank) if end else lambda step: None
    try:
        USERS[user](world, folder, act, **options)
        assert end is None, "the run was complete before its end"
    except StoppedError as stop:
        return str(stop)
    except (KilledError, LostError):
        assert end, "only an end raises it"
    return ""


def alone(**rank_info: Any) -> World:
    return World(RankInfo(**rank_info), torch.device("cpu"))


def results(folder: Path) -> dict[str, Any]:
    """Return what a run leaves, without what depends on the clock."""
    checkpoints, kept = folder / "checkpoints", ("kind", "step", "epoch", "split", "loss", "top1", "samples", "lr")
    records = [each for each in read_records(folder / "metrics.jsonl") if each["kind"] in ("step", "epoch")]
    newest = max(checkpoints.glob("step-*"))
    return {
        "records": [[record.get(name) for name in kept] for record in records],
        "checkpoints": sorted(path.name for path in checkpoints.iterdir()),
        "best": (checkpoints / "best").resolve().name,
        **{path.name: path.read_bytes() for path in newest.glob("*.safetensors")},
    }
