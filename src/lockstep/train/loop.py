"""The training loop: epochs of steps, each followed by an evaluation and a checkpoint.

What differs between strategies, precisions and trackers is in their objects, whose base classes do nothing correctly;
so the loop asks neither for ranks nor for strategies.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lockstep.data.readers import Batch
from lockstep.errors import NonFiniteLossError
from lockstep.train import checkpoint
from lockstep.train.checkpoint import Snapshot
from lockstep.train.evaluation import evaluate
from lockstep.train.metrics import Totals
from lockstep.train.optim import set_rate
from lockstep.train.seeding import seed_step
from lockstep.train.setup import Job


@dataclass(frozen=True)
class Result:
    """What a run came to: the last evaluation, over all workers, and where everything lies."""

    top1: float
    top5: float
    loss: float
    samples: int
    best_top1: float
    steps: int
    seconds: float
    run_dir: Path


def train(job: Job) -> Result:
    """Train to the job's last step.

    Raises:
        NonFiniteLossError: The loss became NaN or infinite; raised on all workers.
        DataError: An image or the user's data set failed.
        CheckpointError: A checkpoint could not be written.
    """
    progress = job.progress
    figures: dict[str, Any] = {}
    while progress.step < job.last_step:
        _train_epoch(job)
        figures = _end_epoch(job)
    if not figures:  # the resumed run was already complete
        figures = _evaluate(job).figures()
    job.checkpoints.export_best(job.folder.model)
    return Result(
        top1=figures["top1"],
        top5=figures["top5"],
        loss=figures["loss"],
        samples=figures["samples"],
        best_top1=progress.best_top1,
        steps=progress.step,
        seconds=progress.seconds,
        run_dir=job.folder.path,
    )


def _train_epoch(job: Job) -> None:
    """Take the rest of the current epoch's steps, up to the job's last."""
    run, progress, steps = job.config.run, job.progress, job.steps_per_epoch
    epoch, start = divmod(progress.step, steps)
    job.tracker.begin_epoch(epoch, job.config.epochs, steps, start)
    job.replica.train()
    batches = job.train_loader.epoch(epoch, start)
    interval = _Interval()
    for position in range(start, steps):
        batch = interval.wait_for(batches)
        seed_step(job.config.seed, progress.step + 1, job.world.rank)
        _take_step(job, batch, job.train_loader.sharding.count(position))
        progress.step += 1
        job.tracker.advance()
        finished = position == steps - 1 or progress.step == job.last_step
        save = run.checkpoint_steps > 0 and progress.step % run.checkpoint_steps == 0 and not finished
        if finished or save or progress.step % run.log_every == 0:
            _report_steps(job, epoch, interval)
            interval = _Interval()
        if save:
            _save(job)
        if finished:
            return


def _take_step(job: Job, batch: Batch, global_count: int) -> None:
    """One optimizer step on this worker's share of `global_count` samples."""
    set_rate(job.optimizer, job.schedule.rate(job.progress.step))
    passes = _split(batch, job.batching.accumulate)
    # Averaged over the workers by the strategy, this makes the gradient that of the mean over the global batch.
    scale = job.strategy.workers_averaged / global_count
    for number, (images, labels, weights) in enumerate(passes, start=1):
        with job.strategy.accumulating(is_last=number == len(passes)):
            with job.precision.autocast():
                logits = job.replica(images)
                losses = job.criterion(logits, labels)
                loss = (losses if weights is None else losses * weights).sum() * scale
            job.precision.backward(loss)
        job.meter.add(losses, logits, labels, weights)
    job.meter.end_step()
    job.strategy.finish_gradients(job.optimizer)
    job.precision.unscale(job.optimizer)
    if job.config.optim.clip_norm:
        nn.utils.clip_grad_norm_(job.model.parameters(), job.config.optim.clip_norm)
    with job.strategy.stepping(job.optimizer):
        job.precision.step(job.optimizer)
    job.optimizer.zero_grad()
    job.average.update()


def _split(batch: Batch, passes: int) -> list[Batch]:
    """A batch in up to `passes` nearly equal parts, none of them empty."""
    if passes == 1:
        return [batch]
    parts = min(passes, len(batch.labels))
    weights = batch.weights.tensor_split(parts) if batch.weights is not None else [None] * parts
    pieces = zip(batch.images.tensor_split(parts), batch.labels.tensor_split(parts), weights, strict=True)
    return [Batch(*piece) for piece in pieces]


class _Interval:
    """The time since the last report, and how much of it was spent waiting for data."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self.wait_seconds = 0.0

    def wait_for(self, batches: Iterator[Batch]) -> Batch:
        start = time.perf_counter()
        batch = next(batches)
        self.wait_seconds += time.perf_counter() - start
        return batch

    def seconds(self) -> float:
        return time.perf_counter() - self._start


def _report_steps(job: Job, epoch: int, interval: _Interval) -> None:
    """Reduce the steps since the last report over the workers, check them, and record them."""
    progress = job.progress
    steps = job.meter.reduce()  # waits for the device, so the time below is that of finished work
    _check_finite(job, steps)
    totals, seconds = sum(steps, Totals()), interval.seconds()
    progress.add_interval(totals, seconds, interval.wait_seconds)
    job.tracker.record(
        {
            "kind": "step",
            "step": progress.step,
            "epoch": epoch + 1,
            **totals.figures(),
            "lr": job.schedule.rate(progress.step - 1),
            "images_per_second": totals.count / seconds,
            "data_wait": interval.wait_seconds / seconds,
            **_times(job),
        }
    )


def _check_finite(job: Job, steps: list[Totals]) -> None:
    """Stop all workers alike if a step's loss was NaN or infinite; no checkpoint has been written since."""
    first = job.progress.step - len(steps) + 1
    for step, totals in enumerate(steps, start=first):
        if not math.isfinite(totals.loss):
            good = checkpoint.newest(job.folder.checkpoints)
            raise NonFiniteLossError(
                f"the loss is {totals.loss / totals.count} at step {step} (epoch "
                f"{(step - 1) // job.steps_per_epoch + 1}, learning rate {job.schedule.rate(step - 1):g}); the last "
                f"good checkpoint: {good or 'none yet'}. Lower --lr, lengthen --warmup-epochs or add --clip-norm 1"
            )


def _end_epoch(job: Job) -> dict[str, Any]:
    """Record the epoch, evaluate, and write the checkpoint that is due."""
    run, progress = job.config.run, job.progress
    epoch, rest = divmod(progress.step, job.steps_per_epoch)
    finished = progress.step == job.last_step
    common = {
        "kind": "epoch",
        "step": progress.step,
        "epoch": epoch + (rest > 0),
        "epochs": job.config.epochs,
    }
    if progress.epoch_totals.count:
        job.tracker.record(
            {
                **common,
                "split": "train",
                **progress.epoch_totals.figures(),
                "images_per_second": progress.epoch_totals.count / progress.epoch_seconds,
                "data_wait": progress.epoch_wait_seconds / progress.epoch_seconds,
                "epoch_seconds": progress.epoch_seconds,
                **_times(job),
            }
        )
    start = time.perf_counter()
    totals = _evaluate(job)
    seconds = time.perf_counter() - start
    figures = totals.figures()
    job.tracker.record(
        {
            **common,
            "split": "val",
            **figures,
            "images_per_second": totals.count / seconds,
            "epoch_seconds": seconds,
            **_times(job),
        }
    )
    if rest == 0:
        progress.end_epoch()
    if finished or (run.checkpoint_epochs and epoch % run.checkpoint_epochs == 0):
        is_best = figures["top1"] > progress.best_top1
        if is_best:
            progress.best_top1, progress.best_step = figures["top1"], progress.step
        _save(job, is_best)
    return figures


def _evaluate(job: Job) -> Totals:
    model = job.average.model
    job.strategy.sync_buffers(model)
    return evaluate(model, job.val_loader, job.precision, job.meter)


def _save(job: Job, is_best: bool = False) -> None:
    job.checkpoints.save(partial(_take_snapshot, job), is_best)


def _take_snapshot(job: Job) -> Snapshot:
    return Snapshot(
        step=job.progress.step,
        model=_copy(job.model.state_dict()),
        average=_copy(job.average.state_dict()),
        optimizer=job.optimizer.state_dict(),
        progress=job.progress.to_mapping(),
        about=job.about(),
        job=job.identity,
    )


def _copy(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for name, tensor in state.items()}


def _times(job: Job) -> dict[str, float]:
    return {"time_seconds": job.progress.seconds, "unix_time": time.time()}
