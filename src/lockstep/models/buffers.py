"""Save a module's buffers before a pass that may change them, and restore them."""

from __future__ import annotations

from collections.abc import Iterable

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
                self._copies[buffer] = earlier[buffer] if buffer in earlier else torch.empty_like(_unexpanded(buffer))
        _copy(self._copies.values(), map(_unexpanded, self._copies))

    def put_back(self) -> None:
        """Restore the saved buffers, even if a module rebound a name to another tensor."""
        for part, name, buffer in self._names:
            part._buffers[name] = buffer
        if self._names:
            _copy(map(_unexpanded, self._copies), self._copies.values())

    def forget(self) -> None:
        """Restore nothing."""
        self._names = []


def _unexpanded(buffer: torch.Tensor) -> torch.Tensor:
    """Return a view without repeated elements, as `expand` makes them: torch copies nothing into these."""
    if buffer.layout is torch.strided and not buffer.is_contiguous():
        for dimension, stride in enumerate(buffer.stride()):
            if not stride:
                buffer = buffer.narrow(dimension, 0, 1)
    return buffer


def _copy(targets: Iterable[torch.Tensor], sources: Iterable[torch.Tensor]) -> None:
    with torch.inference_mode():  # which may write into buffers that an evaluation has made
        if pairs := list(zip(targets, sources, strict=True)):
            torch._foreach_copy_([target for target, _ in pairs], [source for _, source in pairs])
