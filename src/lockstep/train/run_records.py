"""Records of steps, epochs and evaluations, over all workers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from lockstep.errors import NonFiniteLossError
from lockstep.files.metric_records import JOULES_PER_KWH
from lockstep.files.untrusted import printable_name
from lockstep.run.balance import rebalance
from lockstep.run.records.trackers import ALWAYS
from lockstep.run.replicas import are_finite
from lockstep.train.guards.nonfinite import MAX_SKIPPED_IN_A_ROW, where
from lockstep.train.job import Job
from lockstep.train.metrics import Totals, Value
from lockstep.train.strategies import Strategy


def report_steps(job: Job, records: bool = True) -> None:
    """Reduce the steps since the last report over the workers, check them, and record them; or a resumed run does."""
    progress = job.progress
    job.guard.report(job)
    taken = job.meter.reduce()  # waits for the device, so the times below cover finished work
    steps = _finite(job, taken)
    times = job.worker_times.end()
    slow, spread = job.worker_times.report(times, len(taken)), job.worker_times.spread()
    progress.overflowed = ()
    progress.add_interval(steps, times)
    if not records:
        return
    totals, (seconds, wait_seconds) = progress.open_totals, progress.open_times
    progress.open_totals, progress.open_times = Totals(), (0.0, 0.0)
    job.session.record(
        "step",
        epoch=(progress.step - 1) // job.steps_per_epoch + 1,
        **_figures(job, totals, seconds),
        lr=job.optim.optimizer.param_groups[0]["lr"],
        data_wait=wait_seconds / seconds,
        **_loss_scale(job),
        **_traffic(job.optim.strategy),
        **({"phase_spread": spread} if spread else {}),
    )
    progress.epoch_joules += job.session.record_energy(int(totals.count))
    for each in slow:
        job.session.record(each.kind, **asdict(each))
        job.session.say([f"{each.describe()}; {each.advice}"], ALWAYS)
    if job.balance is not None:
        step_in_epoch = (progress.step - 1) % job.steps_per_epoch + 1
        rebalance(job.session, job.balance, job.worker_times.own, len(taken), step_in_epoch)


def report_overflow(job: Job, step: int) -> None:
    """Count and report a step that was skipped because of a NaN or infinite gradient."""
    progress, scale = job.progress, job.optim.precision.loss_scale
    if not are_finite(job.world, job.network.model):
        raise NonFiniteLossError(f"the weights are NaN or infinite before step {step}. {job.session.advise()}")
    progress.leave_out(step)
    now = "now" if job.optim.precision.adapts_loss_scale else "stays"
    job.session.say([f"gradient overflow at step {step}, step skipped, loss scale {now} {scale:g}"])
    if progress.skipped_in_a_row > MAX_SKIPPED_IN_A_ROW:
        raise NonFiniteLossError(
            f"the gradient was NaN or infinite in {progress.skipped_in_a_row} steps in a row up to step {step}, now "
            f"at loss scale {scale:g}. "
            + ("Use --loss-scale dynamic" if scale > 1 else f"{job.session.advise()}, or use --precision bf16")
        )


def report_target_reached(job: Job) -> None:
    """Record that the last evaluation reached --desired-acc."""
    epoch, desired = -(-job.progress.step // job.steps_per_epoch), job.config.run.desired_acc
    job.session.record("desired", epoch=epoch, desired_acc=desired, top1=job.progress.best_top1)


def report_training(job: Job) -> None:
    """Record the training of the finished epoch, including steps before a resume."""
    progress = job.progress
    count, joules = progress.epoch_totals.count, progress.epoch_joules
    if not count:
        return
    _record_epoch(
        job,
        "train",
        progress.epoch_totals,
        progress.epoch_seconds,
        data_wait=progress.epoch_wait_seconds / progress.epoch_seconds,
        phase_seconds=job.worker_times.take_epoch(),
        **({"kilowatt_hours": joules / JOULES_PER_KWH, "joules_per_sample": joules / count} if joules else {}),
    )
    job.session.say(job.loading.data_wait.lines(progress.epoch_wait_seconds, progress.epoch_seconds))


def report_evaluation(job: Job, totals: Totals, seconds: float, metrics: Mapping[str, Value]) -> None:
    job.session.record_energy()  # the next one is that of steps only
    values = {name: _as_json(value) for name, value in metrics.items()}
    _record_epoch(job, "val", totals, seconds, **({"metrics": values} if values else {}))


def _as_json(value: Any) -> Any:
    """Convert a number or an array to JSON; NaN and infinity become None."""
    values = np.asarray(value, dtype=object)
    values[~np.isfinite(np.asarray(value))] = None
    return values.tolist()


def _record_epoch(job: Job, split: str, totals: Totals, seconds: float, **more: Any) -> None:
    epoch, figures = -(-job.progress.step // job.steps_per_epoch), _figures(job, totals, seconds)
    progress = {"split": split, "epoch": epoch, "epochs": job.config.epochs}
    job.epochs.take(job.session.record("epoch", **progress, **figures, epoch_seconds=seconds, **more))


def _figures(job: Job, totals: Totals, seconds: float) -> dict[str, Any]:
    return {**totals.figures(job.has_classes), "images_per_second": totals.count / seconds}


def _finite(job: Job, steps: list[Totals]) -> list[Totals]:
    """Return the steps with a finite loss, dropping those that were skipped.

    Raises:
        NonFiniteLossError: The loss of any other step is NaN or infinite; no checkpoint has been written since.
    """
    progress = job.progress
    finite = []
    for step, totals in enumerate(steps, start=progress.step - len(steps) + 1):
        if math.isfinite(totals.loss):
            finite.append(totals)
        elif step not in progress.overflowed:
            raise NonFiniteLossError(
                f"the loss is {totals.loss / totals.count} at {where(job, step)}. {job.session.advise()}"
            )
    return finite


def _loss_scale(job: Job) -> dict[str, Any]:
    """Return the loss scale (fp16) and the number of skipped steps (fp16, --on-nan skip)."""
    scaled, left_out = bool(job.optim.precision.state_dict()), {"skipped_steps": job.progress.skipped_steps}
    if scaled:
        return {"loss_scale": job.optim.precision.loss_scale, **left_out}
    return left_out if job.config.numerics.on_nan != "stop" else {}


def _traffic(strategy: Strategy) -> dict[str, Any]:
    """Return the bytes of gradients before and after compression, on this worker, since the last record."""
    traffic = strategy.traffic.take()
    if not traffic.plain_bytes:
        return {}
    return {"gradient_bytes": traffic.plain_bytes, "sent_bytes": traffic.sent_bytes}


def list_left_out(paths: Sequence[str]) -> list[str]:
    """Return lines that count and name the skipped files; no lines if there are none."""
    return [f"left out {len(paths)} images that cannot be decoded:", *map(printable_name, paths)] if paths else []
