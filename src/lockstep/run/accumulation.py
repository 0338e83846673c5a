"""What the batches of a step accumulate: gradients that no optimizer step has used yet, and losses."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lockstep.data.exact_loader import ExactLoader
from lockstep.data.shares import Part
from lockstep.errors import ConfigError
from lockstep.run.named_states import is_sharded
from lockstep.run.position import LoopPosition
from lockstep.run.session import Session
from lockstep.world import accelerator

DIVIDED_TWICE = (
    "run.backward: the loss ends in a division by {0}, but with accumulate={0} run.backward itself takes the mean over "
    "a step's batches: leave the division out if it is for that, or the gradients are {0} times too small"
)
OTHER_SHARE = (
    "run.backward: multiplies the whole loss by train.weight, the share of loader='s batch, but the batch of another "
    "loader ({0}) has another share of its step, if only in an epoch's last one. If the loss has both: multiply the "
    "mean over each loader's batch by its .weight, add them up, and call .backward() yourself; or pass drop_last=True"
)
MARK = "_used_at_version"  # an attribute of a gradient, which lives as long as the gradient


class UnusedGradients:
    """Notices gradients that have changed since an optimizer step used them, however they were computed."""

    def __init__(self, models: Iterable[nn.Module], optimizers: Iterable[torch.optim.Optimizer]):
        self._models, self._optimizers = list(models), list(optimizers)
        self.are_sharded = any(map(is_sharded, self._models))

    def mark_used(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Note that an optimizer has taken a step: its post hook. About 0.3 µs per parameter."""
        for grad in _gradients(_parameters_of(optimizer)):
            setattr(grad, MARK, _version(grad))

    def exist(self) -> bool:
        """Return whether there are any, without waiting for the device; zeros that `zero_grad` wrote count, too."""
        return any(True for _ in self._all())

    def scale(self, factor: torch.Tensor) -> None:
        for grad in {id(each): each for each in self._all()}.values():
            grad.mul_(factor)

    def _all(self) -> Iterator[torch.Tensor]:
        models = (model.parameters() for model in self._models)
        parameters = chain(*models, *map(_parameters_of, self._optimizers))
        return (grad for grad in _gradients(parameters) if getattr(grad, MARK, -1) != _version(grad))


def _parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _gradients(parameters: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    return (grad for parameter in parameters if (grad := parameter.grad) is not None)


def _version(grad: torch.Tensor) -> int:
    return (grad.to_local() if isinstance(grad, DTensor) else grad)._version  # FSDP2 adds to the local part


class StepPasses:
    """Runs the backward passes of a step's batches, and collects their losses and weights.

    Attributes:
        losses: Those of the step so far.
    """

    def __init__(self, session: Session[LoopPosition], loader: ExactLoader | None, gradients: UnusedGradients):
        self._session, self._loader, self._weights = session, loader, StepWeights(gradients)
        self.losses = StepLosses()
        self._weight: torch.Tensor | None = None  # given for the current step
        self._is_checked = False
        others = (each for each in ExactLoader.all if each.sharding and each is not loader)
        self._others = WeakSet(others if loader is not None and session.world.size > 1 else ())

    def run(self, loss: torch.Tensor, weight: float | torch.Tensor | None) -> None:
        """Run the backward pass of a batch's mean loss, as `TrainingRun.backward` does."""
        loader, world = self._loader, self._session.world
        share = 1.0 if loader is None else loader.weight  # read also if not used: the loss is weighted
        self._check(loss)
        if loader is not None:
            self._weights.begin(loader.part, weight is not None)
        if weight is None:
            if loader is not None:
                self.losses.add(loss, loader.samples)
                self._compare(share)
            (loss if share == 1.0 else loss * share).backward()
            return
        kind = accelerator.sum_dtype(loss.device)
        own = torch.as_tensor(weight, dtype=kind, device=loss.device).detach().reshape(())
        if loader is not None and not loader.samples:
            own = torch.zeros_like(own)
        self._weight = own
        self.losses.add(loss, own)
        total = world.sum_(own.clone())
        divisor = total if loader is None else self._weights.divisor(total)
        (loss * (own * world.size / divisor)).backward()

    def _check(self, loss: torch.Tensor) -> None:
        """Report a first loss that is divided by the number of batches, too."""
        if self._loader is None or self._is_checked:
            return
        self._is_checked, sharding = True, self._loader.sharding
        passes = sharding.passes_per_step if sharding else 1
        if passes > 1 and is_divided(loss, passes):
            self._session.say([DIVIDED_TWICE.format(passes)])

    def _compare(self, share: float) -> None:
        """Report once a batch of another loader with another share."""
        for each in self._others:
            if each.is_passing and each.has_batch and each.part.weight != share:
                self._session.say([OTHER_SHARE.format(type(each.dataset).__name__)])
                self._others.clear()
                return

    def end_step(self, loss: Any) -> tuple[Any, Any]:
        """Return a loss that `TrainingRun.step` gets, as a mean over the step's batches, and their weight."""
        samples = 1 if self._loader is None else self._loader.samples
        weight = samples if self._weight is None else self._weight
        self._weight = None
        return self.losses.take(loss, weight)


class StepWeights:
    """The sum over the workers of the weights of a step's batches, which is not known until the last of them."""

    def __init__(self, gradients: UnusedGradients):
        self._gradients, self._is_used = gradients, False
        self._part: Part | None = None

    def begin(self, part: Part, is_used: bool) -> None:
        """Note the backward pass of a batch, and whether it has a weight.

        Raises:
            ConfigError: A step of several batches has weights, but not one for each, or FSDP2's gradients.
        """
        differs = part is self._part or (is_used != self._is_used and not part.starts_step)
        if not (part.starts_step and part.completes_step) and (is_used or self._is_used):
            if is_used and self._gradients.are_sharded:
                raise ConfigError("run.backward(weight=): not available for FSDP2 with accumulate=")
            if differs:
                raise ConfigError("run.backward(weight=): with accumulate=, call it once for each batch, with a weight")
        self._part, self._is_used = part, is_used

    def divisor(self, weight: torch.Tensor) -> torch.Tensor:
        """Add a batch's weight, and return by what to divide its loss: the final sum, or for now the first weight."""
        part = self._part
        assert part is not None
        if part.starts_step:
            self._sum, self._first = weight, torch.where(weight > 0, weight, 1.0)
        else:
            self._sum = self._sum + weight
            if part.completes_step:
                self._gradients.scale(self._first / self._sum)
        return self._sum if part.completes_step else self._first


class StepLosses:
    """The losses of the batches of a step, by their order in a batch: one may have several, as of a GAN."""

    def __init__(self) -> None:
        self._rows: list[list[tuple[list[tuple[Any, torch.Tensor]], Any]]] = []
        self._row = 0

    def begin_batch(self) -> None:
        self._row = 0

    def add(self, loss: torch.Tensor, weight: Any) -> None:
        """Add a mean loss over a batch, before its backward pass."""
        if self._row == len(self._rows):
            self._rows.append([])
        values = [(loss.grad_fn, loss.detach())]
        if found := _scaling(loss.grad_fn):  # such as a GradScaler's
            operand, number, is_division = found
            values.append((operand, loss.detach() * number if is_division else loss.detach() / number))
        self._rows[self._row].append((values, weight))
        self._row += 1

    def take(self, given: Any, weight: Any) -> tuple[Any, Any]:
        """Return the mean of a loss over the step's batches, and their weight; the arguments if `add` was not called.

        Args:
            given: The loss of the last batch; `add` may have got a multiple. Any other number is returned as it is.
        """
        rows = self._rows
        self.__init__()  # type: ignore[misc]
        several, own = [row for row in rows if len(row) > 1], getattr(given, "grad_fn", None)
        scaled, number, is_division = (_scaling(own) if several else None) or (None, 1, False)
        for row in several:
            for column, (node, value) in enumerate(row[-1][0]):
                is_multiple = node is not None and node is scaled
                if is_multiple or (node is own if own is not None else _is_same(given, value)):
                    mean = sum(values[column][1] * each for values, each in row) / sum(each for _, each in row)
                    given = (mean / number if is_division else mean * number) if is_multiple else mean
                    return given, sum(each for _, each in row)
        return given, sum(each for _, each in rows[0]) if rows else weight


def is_divided(loss: torch.Tensor, by: int) -> bool:
    """Return whether a loss ends in a division by a number, perhaps before a GradScaler multiplies it."""
    last = _scaling(loss.grad_fn)
    found = [each for each in (last, last and _scaling(last[0])) if each]
    return any(is_division and float(number) == by for _, number, is_division in found)


def _scaling(node: Any) -> tuple[Any, torch.Tensor, bool] | None:
    """Return the operand of a multiplication or division by a number, the number, and whether it is a division."""
    name = node.name() if node else ""
    try:
        number = getattr(node, "_saved_other", None) if name.startswith(("Mul", "Div")) else None
    except RuntimeError:  # freed by a backward pass
        number = None
    if number is None or number.numel() != 1:
        return None
    return node.next_functions[0][0], number, name.startswith("Div")


def _is_same(given: Any, value: torch.Tensor) -> bool:
    """Return whether a number is a loss without its graph; waits for the device only if the caller has done so."""
    return given.data_ptr() == value.data_ptr() if isinstance(given, torch.Tensor) else value.item() == given
