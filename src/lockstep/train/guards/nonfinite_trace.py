"""Find where a worker's values first become NaN or infinite, by repeating its part of a step with hooks.

Weights, batch norm statistics and the random numbers of later steps are unchanged. Gradients are freed first to save
memory.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from lockstep.data.sets import Batch, EncodedSplit
from lockstep.models.global_batch_norm import GlobalBatchNorm
from lockstep.seeding import seed_all
from lockstep.train.guards.base import Training
from lockstep.train.losses import losses_of


class FirstBadNumber(NamedTuple):
    """The finding of one worker: `what` names the first bad value, `loss` is the sum of its samples' losses.

    `what` is "" if all values are finite, or if the search ran out of memory (`looked` is False then).
    """

    what: str
    loss: str
    bad_weight: bool
    host: str
    looked: bool = True


class Buffers:
    """A saved copy of a module's buffers."""

    def __init__(self) -> None:
        self._memory: dict[tuple[nn.Module, str], torch.Tensor] = {}
        self._entries: list[tuple[nn.Module, str, torch.Tensor, torch.Tensor]] = []

    def keep(self, module: nn.Module) -> None:
        """Save the buffers of all submodules; memory is reused while their shapes stay the same."""
        self._entries = [
            (part, name, buffer, self._room(part, name, buffer))
            for part in module.modules()
            for name, buffer in part._buffers.items()
            if buffer is not None
        ]
        self._copy([(kept, buffer) for *_, buffer, kept in self._entries])

    def put_back(self) -> None:
        """Restore the saved buffers, even if a module rebound a name to another tensor."""
        for part, name, buffer, _ in self._entries:
            part._buffers[name] = buffer
        self._copy([(buffer, kept) for *_, buffer, kept in self._entries])

    def _room(self, part: nn.Module, name: str, buffer: torch.Tensor) -> torch.Tensor:
        kept = self._memory.get((part, name))
        if kept is None or (kept.shape, kept.dtype, kept.device) != (buffer.shape, buffer.dtype, buffer.device):
            kept = self._memory[part, name] = torch.empty_like(buffer)
        return kept

    @staticmethod
    def _copy(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        if pairs:
            with torch.no_grad():
                torch._foreach_copy_([target for target, _ in pairs], [source for _, source in pairs])


def trace(job: Training, passes: Sequence[Batch]) -> list[FirstBadNumber]:
    """Return the findings by rank. Collective; needs the step's passes and weights."""
    for parameter in job.network.model.parameters():
        parameter.grad = None
    buffers = Buffers()
    buffers.keep(job.network.model)
    seed_all(job.config.seed, job.progress.step + 1, job.world.rank)  # same dropout as in the step
    weights = [f"the weight {name}" for name, tensor in job.network.model.named_parameters() if _is_bad(tensor)]
    looked = True
    try:
        what, loss = _run(job, passes, weights)
    except RuntimeError as error:
        if not _is_lack_of_memory(error) or _works_together(job.network.model):
            raise
        what, loss, looked = next(iter(weights), ""), 0.0, False
    finally:
        buffers.put_back()
    return [
        FirstBadNumber(*row) for row in job.world.gather([what, str(loss), bool(weights), socket.gethostname(), looked])
    ]


def _is_lack_of_memory(error: RuntimeError) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)  # on a GPU, a CPU


def _works_together(model: nn.Module) -> bool:
    """Return whether the model has collectives within a pass, so that other workers wait for this one."""
    return any(isinstance(module, GlobalBatchNorm | nn.SyncBatchNorm) for module in model.modules())


def _run(job: Training, passes: Sequence[Batch], weights: Sequence[str]) -> tuple[str, float]:
    """Run the whole step even after a bad value: with --sync-bn, the other workers wait for this one's collectives.

    `weights` names the weights that are NaN or infinite.
    """
    inputs, outputs, losses_found, total = [], [], [], 0.0
    named = [(name, parameter) for name, parameter in job.network.model.named_parameters() if parameter.requires_grad]
    bad_gradients: set[str] = set()

    def check_output(name: str, module: nn.Module, output: Any) -> None:
        if any(_is_bad(tensor) for tensor in (output if isinstance(output, tuple | list) else [output])):
            outputs.append(f"the output of layer {name or 'the whole model'} ({type(module).__name__})")

    hooks = [
        module.register_forward_hook(lambda module, _, output, name=name: check_output(name, module, output))
        for name, module in job.network.model.named_modules()
    ]
    done = 0
    try:
        for part in passes:
            rows = part.images.flatten(1).isfinite().all(1).logical_not().nonzero().flatten().tolist()
            inputs += [_sample(job, done + row) for row in rows]
            with job.optim.precision.autocast():
                losses = losses_of(
                    job.optim.criterion,
                    job.network.model(part.images).to(job.optim.precision.loss_dtype),
                    part,
                )
                loss = (losses if part.weights is None else losses * part.weights).sum()
            rows = losses.detach().isfinite().logical_not().nonzero().flatten().tolist()
            losses_found += [f"the loss of {_sample(job, done + row)}" for row in rows]
            total += loss.item()
            gradients = torch.autograd.grad(loss, [tensor for _, tensor in named], allow_unused=True) if named else ()
            bad_gradients |= {name for (name, _), tensor in zip(named, gradients, strict=True) if _is_bad(tensor)}
            done += len(part.labels)
    finally:
        for hook in hooks:
            hook.remove()
    met = [f"the gradient of {name}" for name, _ in reversed(named) if name in bad_gradients]  # in backward order
    found = [*weights, *(f"the input, {sample}" for sample in inputs), *outputs, *losses_found, *met]
    return next(iter(found), ""), total


def _is_bad(tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and not bool(tensor.isfinite().all())


def _sample(job: Training, position: int) -> str:
    """Name a sample of this worker's part of the step by its number in the training set."""
    epoch, step = divmod(job.progress.step, job.steps_per_epoch)
    share = next(iter(job.loading.train_loader.sharding.epoch(epoch, step)))
    if position >= len(share):
        return "a padding sample"
    sample, split = int(share[position]), job.loading.data.train
    return f"sample {sample} of the training set" + (
        f" ({split.name(sample)})" if isinstance(split, EncodedSplit) else ""
    )
