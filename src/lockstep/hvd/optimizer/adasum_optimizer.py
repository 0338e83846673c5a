"""DistributedOptimizer with op=Adasum: each worker takes a local step, and Adasum combines the steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from types import MappingProxyType
from typing import Any

import torch

from lockstep.hvd.compression import send_compressed
from lockstep.hvd.engine.fusion import Allreduce
from lockstep.hvd.engine.request import ADASUM, MAX, Members
from lockstep.hvd.ops.allreduce import allreduce, allreduce_async_, check_adasum
from lockstep.hvd.ops.submission import submit
from lockstep.hvd.optimizer.gradient_optimizer import Wrapper
from lockstep.hvd.process_sets import global_process_set


class AdasumOptimizer(Wrapper):
    """Mixin that `DistributedOptimizer` puts before the user's optimizer class; it also sets the attributes."""

    backward_passes_per_step: int
    _handles: Mapping[torch.Tensor, Any] = MappingProxyType({})  # nothing is in flight outside `step`

    def prepare_for_scaler(self) -> None:
        """Let all workers see an infinite gradient if one of them has one, so that all skip the step."""
        gradients = [p.grad for group in self._own_param_groups() for p in group["params"] if p.grad is not None]
        norms = [torch.linalg.vector_norm(gradient.detach(), math.inf) for gradient in gradients if gradient.numel()]
        overflows = bool(norms) and not bool(torch.stack(norms).isfinite().all())
        first = next(iter(self._parameter_names.values()), "noname")
        any_does = bool(allreduce(torch.tensor(overflows, device="cpu"), name=f"overflows.{first}", op=MAX))
        for gradient in gradients if any_does and not overflows else ():
            gradient.detach().fill_(math.inf)

    def synchronize(self) -> None:
        """Do nothing: steps are combined in `step`."""

    def skip_synchronize(self) -> AbstractContextManager[None]:
        """Raise, since Adasum does not support it.

        Raises:
            AssertionError: Always.
        """
        raise AssertionError("Skipping synchronization is not supported when using Adasum optimizer.")

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Store the number. It has no effect: gradients always accumulate until `step`."""
        self.backward_passes_per_step = passes

    def _allreduce_grad_async(self, parameter: torch.Tensor) -> tuple[int, Any]:
        """Compute this worker's step for one parameter, and start combining it with the other workers' steps.

        For code that schedules this itself instead of calling `step`. The parameter does not change.

        Returns:
            A handle for `synchronize`, and the context for the compression's `decompress`. The decompressed result is
            the combined step, to be added to the parameter.
        """
        groups = [group["params"] for group in self.param_groups]
        for group in self.param_groups:
            group["params"] = [one for one in group["params"] if one is parameter]
        with torch.no_grad():
            start = parameter.clone()
            self.take_step(None)
            change = parameter - start
            parameter.copy_(start)
        for group, parameters in zip(self.param_groups, groups, strict=True):
            group["params"] = parameters
        tensor, context = self._compression.compress(change)
        return allreduce_async_(tensor, name=self._parameter_names.get(parameter), op=ADASUM), context

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step with this worker's gradients, then replace it with the adaptive sum of all workers' steps.

        Raises:
            NotImplementedError: The number of workers is not a power of 2.
            HorovodInternalError: The requests do not match, or a worker disconnected.
        """
        check_adasum(ADASUM, global_process_set)
        named = [(name, parameter) for name, parameter in self._named_own_parameters() if parameter.requires_grad]
        parameters = [parameter for _, parameter in named]
        with torch.no_grad():
            starts = [parameter.clone() for parameter in parameters]
        result = self.take_step(closure)
        with torch.no_grad():
            changes = [parameter - start for parameter, start in zip(parameters, starts, strict=True)]
            if changes:
                members = Members.of(f"{self._made_of[-1]}step", [name for name, _ in named])
                changes = send_compressed(partial(_combine, members), changes, self._compression)
            for parameter, start, change in zip(parameters, starts, changes, strict=True):
                parameter.copy_(start + change)
        self.watch_replicas()
        return result

    step.hooked = True  # type: ignore[attr-defined] # the wrapped class's step runs the optimizer's hooks


def _combine(members: Members, tensors: list[torch.Tensor]) -> Any:
    options = {"operation": ADASUM, "grouped": True, "in_place": True, "urgent": True, "members": members}
    return submit(Allreduce, tensors, members.label, global_process_set, **options).wait()
