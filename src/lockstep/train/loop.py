"""The training loop: epochs of steps, each followed by an evaluation and a checkpoint.

Strategies, precisions and trackers are objects whose base classes are correct no-ops, so the loop never branches on
the rank or the strategy.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lockstep.data.sets import Batch
from lockstep.diagnosis import publisher
from lockstep.models.nested import cast, leaves, map_tensors
from lockstep.run.session import divides
from lockstep.seeding import seed_step
from lockstep.train.begin import save
from lockstep.train.history import History
from lockstep.train.job import Job
from lockstep.train.metrics import Measured, Totals, Value, evaluate, losses_of
from lockstep.train.optim.build import clip_gradients
from lockstep.train.run_records import (
    report_evaluation,
    report_overflow,
    report_steps,
    report_target_reached,
    report_training,
)
from lockstep.world import observer


@dataclass(frozen=True)
class Result:
    """Results of a run: the last evaluation, over all workers, and the run folder.

    Attributes:
        top1: Fraction of validation samples classified correctly, 0 to 1; NaN if targets are not classes.
        top5: Fraction of validation samples whose class is among the first five predictions, or NaN.
        loss: Mean loss of the validation samples.
        samples: Number of validation samples, over all workers.
        best_top1: The best `top1` of all evaluations, or NaN.
        steps: Optimizer steps, over all sessions.
        seconds: Training time over all sessions, by this worker's clock.
        run_dir: The run folder, with records and checkpoints.
        classes: Class names.
        metrics: The metrics passed to `fit`, from the last evaluation.
        history: Values of each epoch, over all sessions; times by this worker's clock.
        confusion_matrix: Validation samples by true class (row) and predicted class (column), int64 [K, K]. Only from
            `fit`, with up to 2,000 classes.
    """

    top1: float
    top5: float
    loss: float
    samples: int
    best_top1: float
    steps: int
    seconds: float
    run_dir: Path
    classes: tuple[str, ...] = field(repr=False)
    metrics: Mapping[str, Value] = field(compare=False)  # the truth value of an array is ambiguous
    history: History = field(compare=False, repr=False)
    confusion_matrix: npt.NDArray[np.int64] | None = field(compare=False, repr=False)

    @property
    def per_class_accuracy(self) -> dict[str, float]:
        """Accuracy of each class on the validation samples, 0 to 1; NaN for a class without samples.

        Raises:
            ValueError: There is no confusion matrix.
        """
        if self.confusion_matrix is None:
            raise ValueError(
                "no confusion matrix: only fit() counts predictions by class, if targets are up to 2,000 classes"
            )
        right, samples = self.confusion_matrix.diagonal(), self.confusion_matrix.sum(1)
        return {
            name: float(right[index] / samples[index]) if samples[index] else math.nan
            for index, name in enumerate(self.classes)
        }


def train(job: Job) -> Result:
    """Train to the job's last step, or until the desired accuracy is reached.

    Raises:
        NonFiniteLossError: The loss became NaN or infinite; raised on all workers.
        DataError: An image cannot be read, or an item of the user's data set is invalid.
        CheckpointError: A stop was requested, but its checkpoint could not be written.
        ReplicasDifferError: The workers' weights differ; raised on all workers.
        StoppedError: A worker received a stop signal, or the time limit is near; raised on all workers, after writing
            a checkpoint.
    """
    try:
        return _train(job)
    finally:
        publisher.finish()


def _train(job: Job) -> Result:
    progress = job.progress
    job.worker_times.restart()
    figures: dict[str, Any] | None = None
    measured = Measured()
    # Resumed between training and evaluation.
    if progress.epoch_totals.count and progress.step % job.steps_per_epoch == 0:
        figures, measured = _end_epoch(job)
    desired_acc = job.config.run.desired_acc or math.inf  # of any evaluation of the run, even before a resume
    while progress.step < job.last_step and progress.best_top1 < desired_acc:
        before = progress.step
        train_epoch(job)
        if figures is None or progress.step > before:
            figures, measured = _end_epoch(job)
        elif not _is_due(job, figures):  # a callback stopped the run before the epoch's first step
            _save_evaluated(job, figures)
    if figures is None:  # the resumed run was already complete
        figures, measured = _end_epoch(job)
    return Result(
        top1=figures.get("top1", math.nan),
        top5=figures.get("top5", math.nan),
        loss=figures["loss"],
        samples=figures["samples"],
        best_top1=progress.best_top1 if job.has_classes else math.nan,
        steps=progress.step,
        seconds=progress.seconds,
        run_dir=job.session.folder.path,
        classes=job.loading.data.classes,
        metrics=measured.metrics,
        history=job.epochs.history(),
        confusion_matrix=measured.confusion,
    )


def train_epoch(job: Job) -> None:
    """Run the remaining steps of the current epoch, up to the job's last step."""
    run, progress, steps = job.config.run, job.progress, job.steps_per_epoch
    stopping = job.session.stopping
    epoch, start = divmod(progress.step, steps)
    job.hooks.begin_epoch()
    if progress.step >= job.last_step:
        return
    for tracker in job.session.trackers:
        tracker.begin_epoch(epoch, job.config.epochs, min(steps, job.last_step - epoch * steps), start)
    if observer.current:
        observer.current.interrupt()
    job.network.train()
    batches = job.loading.train_loader.epoch(epoch, start)
    for position in range(start, steps):
        began = time.perf_counter()
        job.clock.begin("data_wait")
        batch = next(batches)
        if position == start:
            job.loading.data_wait.first_batch(time.perf_counter() - began)
        job.clock.begin("callbacks")
        job.hooks.begin_step()
        job.clock.begin("optimizer")
        seed_step(job.config.seed, progress.step + 1, job.world.rank)
        stopping.ask()
        job.guard.begin(job)
        take_step(job, batch, position)
        job.session.complete_step()
        for tracker in job.session.trackers:
            tracker.advance()
        job.clock.begin("callbacks")
        job.hooks.end_step()
        job.clock.begin("reduction")
        job.hooks.agree()
        job.session.check_replicas()
        finished = position == steps - 1 or progress.step >= job.last_step
        stop = stopping.answer() and progress.step < job.last_step  # after the last step the run finishes anyway
        job.clock.end()
        if observer.current:  # a study's; another one has turned itself off
            observer.current.take_step(len(job.loading.train_loader.samples_of(position)))
        durably = job.session.due(False, is_last=finished)
        records = finished or durably is not None or progress.step % run.log_every == 0
        if records or stop:
            _settle(job, progress.step)
            job.session.folder.check()
            report_steps(job, records)
            if stop or durably is not None:
                save(job, durably=stop or bool(durably))
                if observer.current:
                    observer.current.interrupt()
        if stop:
            raise job.session.stop(job.last_step)
        if finished or progress.step >= job.last_step:  # a callback may have stopped the run at the checkpoint
            return


def take_step(job: Job, batch: Batch, position: int) -> None:
    """Take one optimizer step on this worker's share of global batch `position` of the epoch."""
    clock, optim, sharding = job.clock, job.optim, job.loading.train_loader.sharding
    strategy, precision, optimizer = optim.strategy, optim.precision, optim.optimizer
    clock.begin("optimizer")
    passes = split_batch(batch, sharding.passes(position))
    # After the strategy averages over the workers, the gradient is that of the mean over the global batch.
    scale = strategy.workers_averaged / sharding.count(position)
    for number, part in enumerate(passes, start=1):
        with strategy.accumulating(is_last=number == len(passes)):
            clock.begin("forward")
            with precision.autocast():
                outputs = job.network.replica(part.images)
                losses = losses_of(optim.criterion, cast(outputs, precision.loss_dtype), part)
            clock.begin("backward")
            if number == len(passes):
                strategy.mark_reduction(losses, partial(clock.begin, "reduction"))
            precision.backward(losses, _factors(losses, part, scale))
        clock.begin("metrics")
        job.meter.add(losses, outputs, part.labels, part.weights)
    job.meter.end_step()
    clock.begin("reduction")
    strategy.finish_gradients()
    clock.begin("optimizer")
    _settle(job, job.progress.step)  # here, because the device stays busy with this step's passes
    optim.schedule.apply(optimizer, job.progress.steps_taken, job.progress.step)
    precision.unscale(optimizer)
    if job.guard.allows(job, passes):
        _step(job)
    else:
        strategy.forget_gradients()
    for parameter in job.network.parameters:  # nn.Module.zero_grad searches the modules for them
        parameter.grad = None


def _factors(losses: torch.Tensor, part: Batch, scale: float) -> torch.Tensor:
    """Return the factor of each sample's loss in the loss of the step, [N]."""
    if part.weights is not None:
        return part.weights.to(losses.dtype) * scale
    return losses.new_full((), scale).expand_as(losses)


def _step(job: Job) -> None:
    """Run the optimizer, unless the loss scaler skips the step."""
    precision, optimizer, average = job.optim.precision, job.optim.optimizer, job.optim.average
    job.session.copies.protect()
    if job.config.optim.clip_norm:
        clip_gradients(optimizer, job.config.optim.clip_norm)
    step, loss_scale = job.progress.step + 1, precision.loss_scale
    taken = precision.step(optimizer)
    if taken is None:
        average.update(unless=precision.found_inf)
        if job.optim.strategy.remembers_gradients:
            _settle(job, step)
        return
    if taken:
        average.update()
    _conclude(job, step, taken, loss_scale)


def _settle(job: Job, step: int) -> None:
    """Read whether the device took the step, if not read yet, and act on it."""
    precision = job.optim.precision
    loss_scale = precision.loss_scale
    taken = precision.outcome(job.optim.optimizer)
    if taken is False:
        job.optim.average.take_back()
    if taken is not None:
        _conclude(job, step, taken, loss_scale)


def _conclude(job: Job, step: int, taken: bool, loss_scale: float) -> None:
    """Count a step as taken or skipped, and adjust the strategy's state; `loss_scale` is the one before the step.

    Raises:
        NonFiniteLossError: As for `report_overflow`.
    """
    precision, strategy = job.optim.precision, job.optim.strategy
    if not taken:
        strategy.forget_gradients()
        report_overflow(job, step)
        return
    job.progress.skipped_in_a_row = 0
    if precision.loss_scale != loss_scale:
        strategy.rescale(precision.loss_scale / loss_scale)


def split_batch(batch: Batch, passes: int) -> list[Batch]:
    """Split a batch into up to `passes` non-empty parts of nearly equal size."""
    if passes == 1:
        return [batch]
    parts = min(passes, len(next(leaves(batch.labels))))

    def piece(number: int) -> Batch:
        return Batch(*map_tensors(lambda tensor: tensor.tensor_split(parts)[number], tuple(batch)))

    return [piece(number) for number in range(parts)]


def _end_epoch(job: Job) -> tuple[dict[str, Any], Measured]:
    """Record the epoch, evaluate, and write a checkpoint if due. Return the results of the evaluation."""
    progress = job.progress
    report_training(job)
    start = time.perf_counter()
    totals = _evaluate(job)
    seconds = time.perf_counter() - start
    job.worker_times.exclude(seconds)
    if job.session.stopping.agreed and progress.step < job.last_step:
        save(job)
        raise job.session.stop(job.last_step)
    figures, measured = totals.figures(job.has_classes), job.measures.reduce()
    report_evaluation(job, totals, seconds, measured.metrics)
    publisher.report("running")
    job.hooks.end_epoch({**figures, **measured.metrics})
    if progress.step % job.steps_per_epoch == 0:
        progress.end_epoch()
    if _is_due(job, figures) or progress.step >= job.last_step:
        _save_evaluated(job, figures)
    return figures, measured


def _reaches_target(job: Job, figures: Mapping[str, Any]) -> bool:
    return bool(figures.get("top1", -math.inf) >= (job.config.run.desired_acc or math.inf))


def _is_due(job: Job, figures: Mapping[str, Any]) -> bool:
    """Return whether a checkpoint is due after this evaluation, even if the run continues."""
    run, step = job.config.run, job.progress.step
    by_epoch = divides(run.checkpoint_epochs, step // job.steps_per_epoch)
    return by_epoch or divides(run.checkpoint_steps, step) or _reaches_target(job, figures)


def _save_evaluated(job: Job, figures: Mapping[str, Any]) -> None:
    """Write a checkpoint of the evaluated state."""
    progress = job.progress
    is_best = progress.take_evaluation(figures)
    save(job, is_best)
    if is_best and _reaches_target(job, figures):  # for the first time
        report_target_reached(job)


def _evaluate(job: Job) -> Totals:
    """Evaluate the model. If the workers agree to stop before the last step, the totals are incomplete."""
    model = job.optim.average.model
    job.optim.strategy.broadcast(model.buffers())
    batches: Iterable[Batch] = job.loading.val_loader
    if job.progress.step < job.last_step:
        batches = job.session.stopping.until_agreed(batches, rounds=max(job.world.gather(len(job.loading.val_loader))))
    return evaluate(model, batches, job.optim.precision, job.meter, job.eval_criterion, job.measures)
