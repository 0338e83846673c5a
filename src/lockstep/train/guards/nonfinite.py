"""`--on-nan`: detect NaN and infinite gradients before the update, and stop or skip the step.

The reduced gradients are bitwise equal on all workers, so all reach the same decision without communicating. `skip`
checks them in each step, and so does `stop` on a CPU; on a GPU, `stop` keeps the flags on the device until the next
report. In fp16 the loss scaler handles infinite gradients instead.

`trace` finds where a worker's values first become NaN or infinite, by repeating its part of a step with hooks. Weights,
batch norm statistics and the random numbers of later steps are unchanged. Gradients are freed first to save memory.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from lockstep.config.schema import NumericsConfig
from lockstep.data.sets import Batch, EncodedSplit
from lockstep.errors import NonFiniteLossError
from lockstep.models.buffers import Buffers
from lockstep.models.nested import cast, leaves
from lockstep.run.records.trackers import ALWAYS
from lockstep.run.replicas import SYNCHRONIZED
from lockstep.seeding import seed_all
from lockstep.train.job import Guard, Job
from lockstep.train.metrics import losses_of
from lockstep.train.optim.build import gradients_of
from lockstep.train.precision import Precision

MAX_SKIPPED_IN_A_ROW = 25  # by then a dynamic loss scale has dropped from 65,536 to 0.002
# Arguments of the check, kept because their creation takes as long as the check of a small network.
_FOUND_INF, _SCALE = (torch.tensor(value, dtype=torch.float32, device="cpu") for value in (0.0, 1.0))


class Watch(Guard):
    """--on-nan stop: checks each step's gradients on the host."""

    def allows(self, job: Job, passes: Sequence[Batch]) -> bool:
        return bool(all_finite(gradients_of(job.optim.optimizer))) or self._goes_on(job, passes)

    def _goes_on(self, job: Job, passes: Sequence[Batch]) -> bool:
        raise NonFiniteLossError(f"{_describe(job, trace(job, passes))}. {job.session.advise()}")


class DeferredWatch(Watch):
    """--on-nan stop on a GPU: reads the flags only with each report."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: list[torch.Tensor | bool] = []  # of each step since the last report

    def allows(self, job: Job, passes: Sequence[Batch]) -> bool:
        self._kept.append(all_finite(gradients_of(job.optim.optimizer)))
        return True

    def report(self, job: Job) -> None:
        step = self._first(job)
        if not step:
            return
        finite = job.world.gather(job.meter.is_finite(job.progress.step - step))
        bad = [rank for rank, good in enumerate(finite) if not good]
        whose = f"; so is the loss on worker{'s' * (len(bad) > 1)} {', '.join(map(str, bad))}" if bad else ""
        raise NonFiniteLossError(
            f"the gradient is NaN or infinite at {where(job, step)}{whose}. {job.session.advise()}. "
            f"--on-nan skip checks each step and names the layer"
        )

    def _first(self, job: Job) -> int:
        """Return the first step since the last report with a NaN or infinite gradient; 0 if there is none."""
        device = job.world.device
        good = torch.stack([torch.as_tensor(each, device=device) for each in self._kept]).tolist() if self._kept else []
        self._kept.clear()
        return job.progress.step - len(good) + 1 + good.index(False) if not all(good) else 0


class Skip(Watch):
    """--on-nan skip: skips the update, and restores the buffers that the step's passes changed."""

    def __init__(self) -> None:
        super().__init__()
        self._buffers = Buffers()

    def begin(self, job: Job) -> None:
        self._buffers.keep(job.network.model)

    def _goes_on(self, job: Job, passes: Sequence[Batch]) -> bool:
        self._buffers.put_back()
        findings = trace(job, passes)
        problem = _describe(job, findings)
        if any(finding.bad_weight for finding in findings):
            raise NonFiniteLossError(f"{problem}. Skipping steps cannot repair weights. {job.session.advise()}")
        _leave_out(job, problem)
        return False


def build_guard(config: NumericsConfig, precision: Precision, device_type: str) -> Guard:
    if precision.state_dict():  # scales the loss and skips overflows
        return Guard()
    if config.on_nan == "skip":
        return Skip()
    return Watch() if device_type == "cpu" else DeferredWatch()


def all_finite(gradients: list[torch.Tensor]) -> torch.Tensor | bool:
    """Return whether all numbers are finite; for gradients on a GPU, as a scalar there."""
    if all(each.is_cpu and each.layout is torch.strided and each.is_floating_point() for each in gradients):
        # On a CPU, the norm of infinite order takes 12 times as long as this, which multiplies by 1.
        _FOUND_INF.zero_()
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, _FOUND_INF, _SCALE)
        return not _FOUND_INF.item()
    return torch.stack(torch._foreach_norm(gradients, math.inf)).max().isfinite()


def _leave_out(job: Job, why: str) -> None:
    """Count and report the current step as skipped; raise NonFiniteLossError after too many in a row."""
    progress = job.progress
    progress.leave_out(progress.step + 1)
    job.session.say([f"{why}; step skipped"], ALWAYS)
    if progress.skipped_in_a_row > MAX_SKIPPED_IN_A_ROW:
        raise NonFiniteLossError(
            f"{why}, the last of {progress.skipped_in_a_row} such steps in a row. {job.session.advise()}"
        )


def _describe(job: Job, findings: Sequence[FirstBadNumber]) -> str:
    """Describe the problem of the current step in one clause."""
    loss = sum(float(finding.loss) for finding in findings)
    what = "the gradient is NaN or infinite" if math.isfinite(loss) else f"the loss is {loss}"
    return f"{what} at {where(job, job.progress.step + 1)}: {describe_findings(findings)}"


def where(job: Job, step: int) -> str:
    """Name a step, its epoch and the learning rate."""
    epoch, rate = (step - 1) // job.steps_per_epoch + 1, job.optim.optimizer.param_groups[0]["lr"]
    return f"step {step} (epoch {epoch}, current learning rate {rate:g})"


def describe_findings(findings: Sequence[FirstBadNumber]) -> str:
    bad = [f"worker {rank} on {finding.host} {finding.what}" for rank, finding in enumerate(findings) if finding.what]
    more = [f"{len(bad) - 4} more workers"] if len(bad) > 4 else []
    return ", ".join([*bad[:4], *more]) or "each worker's values are finite, but their sum is not"


class FirstBadNumber(NamedTuple):
    """The finding of one worker: `what` says where the first bad value is, `loss` is the sum of its samples' losses.

    `what` is "" if all values are finite; it also says that the search ran out of memory.
    """

    what: str
    loss: str
    bad_weight: bool
    host: str


def trace(job: Job, passes: Sequence[Batch]) -> list[FirstBadNumber]:
    """Return the findings by rank. Collective; needs the step's passes and weights."""
    for parameter in job.network.model.parameters():
        parameter.grad = None
    buffers = Buffers()
    buffers.keep(job.network.model)
    seed_all(job.config.seed, job.progress.step + 1, job.world.rank)  # same dropout as in the step
    weights = [f"the weight {name}" for name, tensor in job.network.model.named_parameters() if _is_bad(tensor)]
    try:
        what, loss = _run(job, passes, weights)
    except RuntimeError as error:
        if not _is_lack_of_memory(error) or any(isinstance(part, SYNCHRONIZED) for part in job.network.model.modules()):
            raise  # the other workers wait in collectives of this pass
        what, loss = f"found it first in {weights[0]}" if weights else "ran out of memory searching for it", 0.0
    finally:
        buffers.put_back()
    rows = job.world.gather([what, str(loss), bool(weights), socket.gethostname()])
    return [FirstBadNumber(*row) for row in rows]


def _is_lack_of_memory(error: RuntimeError) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)  # on a GPU, a CPU


def _run(job: Job, passes: Sequence[Batch], weights: Sequence[str]) -> tuple[str, float]:
    """Run the whole step even after a bad value: with --sync-bn, the other workers wait for this one's collectives.

    `weights` names the weights that are NaN or infinite.
    """
    inputs, outputs, losses_found, total = [], [], [], 0.0
    named = [(name, parameter) for name, parameter in job.network.model.named_parameters() if parameter.requires_grad]
    bad_gradients: set[str] = set()

    def check_output(name: str, module: nn.Module, output: Any) -> None:
        if any(map(_is_bad, leaves(output))):
            outputs.append(f"the output of layer {name or 'the whole model'} ({type(module).__name__})")

    hooks = [
        module.register_forward_hook(lambda module, _, output, name=name: check_output(name, module, output))
        for name, module in job.network.model.named_modules()
    ]
    done = 0
    try:
        for part in passes:
            bad_rows = [leaf.isfinite().logical_not().reshape(len(leaf), -1).any(1) for leaf in leaves(part.images)]
            rows = torch.stack(bad_rows).any(0).nonzero().flatten().tolist()
            inputs += [_sample(job, done + row) for row in rows]
            with job.optim.precision.autocast():
                logits = cast(job.network.model(part.images), job.optim.precision.loss_dtype)
                losses = losses_of(job.optim.criterion, logits, part)
                loss = (losses if part.weights is None else losses * part.weights).sum()
            rows = losses.detach().isfinite().logical_not().nonzero().flatten().tolist()
            losses_found += [f"the loss of {_sample(job, done + row)}" for row in rows]
            total += loss.item()
            gradients = torch.autograd.grad(loss, [tensor for _, tensor in named], allow_unused=True) if named else ()
            bad_gradients |= {name for (name, _), tensor in zip(named, gradients, strict=True) if _is_bad(tensor)}
            done += len(losses)
    finally:
        for hook in hooks:
            hook.remove()
    met = [f"the gradient of {name}" for name, _ in reversed(named) if name in bad_gradients]  # in backward order
    found = [*weights, *(f"the input, {sample}" for sample in inputs), *outputs, *losses_found, *met]
    return f"found it first in {found[0]}" if found else "", total


def _is_bad(tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and not bool(tensor.isfinite().all())


def _sample(job: Job, position: int) -> str:
    """Name a sample of this worker's part of the step by its number in the training set."""
    share = job.loading.train_loader.samples_of(job.progress.step % job.steps_per_epoch)
    if position >= len(share):
        return "a padding sample"
    sample, split = int(share[position]), job.loading.data.train
    return f"sample {sample} of the training set" + (
        f" ({split.name(sample)})" if isinstance(split, EncodedSplit) else ""
    )
