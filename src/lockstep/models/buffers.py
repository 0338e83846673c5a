"""Save a module's buffers before a pass that may change them, and restore them; write into expanded ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import copy
from typing import Any

import torch
from torch import nn


class Buffers:
    """A saved copy of a module's buffers, whose memory is reused. The module's submodules stay the same."""

    def __init__(self) -> None:
        self._module: nn.Module | None = None
        self._parts: list[nn.Module] = []
        self._names: list[tuple[nn.Module, str, torch.Tensor | None]] = []
        self._copies: dict[torch.Tensor, torch.Tensor] = {}

    def keep(self, module: nn.Module) -> None:
        """Save the buffers of all submodules."""
        if module is not self._module:
            self._module, self._parts = module, [*module.modules()]
        self._names = [(part, name, buffer) for part in self._parts for name, buffer in part._buffers.items()]
        earlier, self._copies = self._copies, {}
        for _, _, buffer in self._names:
            if buffer is not None:
                self._copies[buffer] = earlier[buffer] if buffer in earlier else torch.empty_like(unexpanded(buffer))
        _copy(self._copies.values(), map(unexpanded, self._copies))

    def put_back(self) -> None:
        """Restore the saved buffers, even if a module rebound a name to another tensor."""
        for part, name, buffer in self._names:
            part._buffers[name] = buffer
        if self._names:
            _copy(map(unexpanded, self._copies), self._copies.values())


def unexpanded(buffer: torch.Tensor) -> torch.Tensor:
    """Return a view without repeated elements, as `expand` makes them: torch copies nothing into these."""
    return _without_repeats(buffer, buffer)


def _without_repeats(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor that `like`, of the same shape, has in memory."""
    if like.layout is torch.strided and not like.is_contiguous():
        for dimension, stride in enumerate(like.stride()):
            if not stride:
                tensor = tensor.narrow(dimension, 0, 1)
    return tensor


def load_state(module: nn.Module, state: Mapping[str, Any], strict: bool = True) -> Any:
    """Load a state_dict, also into expanded tensors, and return what `load_state_dict` does."""
    loaded: Any = copy(state)  # with the modules' versions
    for name, own in module.state_dict(keep_vars=True).items():
        stored = loaded.get(name)
        if isinstance(own, torch.Tensor) and isinstance(stored, torch.Tensor) and own.shape == stored.shape:
            part = _without_repeats(stored, own)
            if part is not stored and torch.equal(part.expand_as(stored), stored):
                with torch.no_grad():
                    unexpanded(own).copy_(part)
                loaded[name] = own  # torch copies no tensor into itself
    return module.load_state_dict(loaded, strict=strict)


def _copy(targets: Iterable[torch.Tensor], sources: Iterable[torch.Tensor]) -> None:
    with torch.inference_mode():  # which may write into buffers that an evaluation has made
        if pairs := list(zip(targets, sources, strict=True)):
            torch._foreach_copy_([target for target, _ in pairs], [source for _, source in pairs])
