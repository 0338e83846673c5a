"""`--cuda-graph`: the model's forward and backward pass as two CUDA graphs, each of which the host launches at once.

A host that enqueues each kernel is slower than a fast GPU with a small model. torch captures the passes of the first
batch and replays them for each batch of its shape (`torch.cuda.make_graphed_callables`). The loss, the reduction and
the optimizer stay outside, so rates, loss scales and skipped steps need no graph. The kernels are those of an eager
pass, also of dropout, whose generator the graphs read: results are equal to the bit.
"""

from __future__ import annotations

import inspect
import pickle
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from lockstep.config.schema import TrainConfig
from lockstep.errors import ConfigError, first_line
from lockstep.models.buffers import Buffers
from lockstep.models.nested import leaves, map_tensors
from lockstep.run.data_parallel import HOOKS

FLAG = "--cuda-graph"
FIX = f"leave out {FLAG}"


def check_capturable(config: TrainConfig, model: nn.Module, device: torch.device) -> None:
    """Refuse passes that a graph cannot hold.

    Raises:
        ConfigError: With the reason.
    """
    hooked = next((name for name, each in model.named_modules() if any(vars(each).get(kind) for kind in HOOKS)), None)
    reasons = {
        f"it needs an NVIDIA or AMD GPU, but this worker runs on {device.type}": device.type != "cuda",
        "--compile replaces the kernels that a graph would hold; use one of them": config.model.compile,
        "--strategy dp copies its replicas in each step; use ddp": config.parallel.strategy == "dp",
        "--sync-bn waits for other workers in the forward pass": config.parallel.sync_bn,
        "with --accumulate, a graph would overwrite the gradients of the pass before": config.accumulate > 1,
        f"the hooks of layer {hooked or 'the whole model'} would run only once": hooked is not None,
    }
    if reason := next((text for text, applies in reasons.items() if applies), None):
        raise ConfigError(f"{FLAG}: {reason}{'' if ';' in reason else f'; {FIX}'}")


class CapturedPasses(nn.Module):
    """A model whose passes in training are replayed for batches of the first one's shape; others run as usual.

    So do all while a layer has another mode, or a parameter is trained or not, other than in the first pass. All else
    that varies between steps must be in the inputs, the parameters, the buffers or the device's random numbers.
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model
        self._replay: Any = None
        self._kind: list[Any] = []
        self._layers, self._parameters_found = [*model.modules()], [*model.parameters()]

    def forward(self, *inputs: Any) -> Any:
        if not (self.model.training and torch.is_grad_enabled()):
            return self.model(*inputs)
        kind: list[Any] = [(each.shape, each.dtype, each.stride()) for each in leaves(inputs)]
        kind += [layer.training for layer in self._layers]
        kind += [parameter.requires_grad for parameter in self._parameters_found]
        if self._replay is None:
            self._parameters_used = [each for each in self._parameters_found if each.requires_grad]
            self._replay, self._kind = self._capture(inputs), kind
        if kind != self._kind:  # an epoch's last, smaller batch
            return self.model(*inputs)
        # Clones, since the next step overwrites the graph's own outputs.
        return map_tensors(torch.clone, self._replay(*inputs, *self._parameters_used))

    def _capture(self, inputs: tuple[Any, ...]) -> Any:
        """Capture both passes; the buffers and the generators are afterwards as before.

        Raises:
            ConfigError: A pass needs the host, such as to read a number.
        """
        make: Any = torch.cuda.make_graphed_callables
        options: dict[str, Any] = {"allow_unused_input": True}
        if "capture_error_mode" in inspect.signature(make).parameters:  # not before torch 2.12
            options["capture_error_mode"] = "thread_local"  # the loader's threads may allocate at the same time
        samples = (*map_tensors(torch.clone, inputs), *self._parameters_used)
        with _state_kept(self.model), _without_cached_casts():
            before, buffers = _host_generators(), [*self.model.buffers()]
            try:
                replay = make(lambda *given: self.model(*given[: len(inputs)]), samples, **options)
            except Exception as error:
                reason = f"the model's passes cannot be captured: {first_line(error)}"
                raise ConfigError(f"{FLAG}: {reason}; {FIX}") from error
            after = _host_generators()
            is_replaced = [*map(id, self.model.buffers())] != [*map(id, buffers)]
        if before != after:
            raise ConfigError(
                f"{FLAG}: the model draws random numbers on the host in its forward pass, which a graph would repeat; "
                f"draw them on the device, or {FIX}"
            )
        if is_replaced:
            raise ConfigError(
                f"{FLAG}: the model replaces a buffer in its forward pass, which a graph would do only once; write "
                f"into it, such as with copy_(), or {FIX}"
            )
        return replay


def _host_generators() -> list[bytes]:
    return [pickle.dumps(each) for each in (random.getstate(), np.random.get_state(), torch.get_rng_state().numpy())]


@contextmanager
def _state_kept(model: nn.Module) -> Iterator[None]:
    """Restore the buffers, and the device's generator, which torch's warm-up changes."""
    buffers = Buffers()
    buffers.keep(model)
    kinds = {each.device.type for each in model.parameters()} - {"cpu"}
    device: Any = torch.get_device_module(kinds.pop()) if kinds else None
    generator = device and device.get_rng_state()
    try:
        yield
    finally:
        buffers.put_back()
        if device:
            device.set_rng_state(generator)


@contextmanager
def _without_cached_casts() -> Iterator[None]:
    """Autocast as the caller does, but without its cache of weights, which would not be in the graph."""
    before = torch.is_autocast_cache_enabled()
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
