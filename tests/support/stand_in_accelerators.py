"""Fixtures for a machine with other accelerators than this one.

What needs streams and kernels runs on the simulated GPU (`simulated_gpu`). These are for what a module makes of the
accelerators' names, numbers and answers.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lockstep.world import accelerator, machine


@pytest.fixture
def accelerators(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function whose arguments are answers of `accelerator`'s functions, or of `machine.drivers`.

    They are values, or functions themselves.
    """

    def answer(**answers: Any) -> None:
        for name, value in answers.items():
            function = value if callable(value) else lambda *_, value=value: value
            monkeypatch.setattr(machine if name == "drivers" else accelerator, name, function)

    return answer


@pytest.fixture
def device_module(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function whose arguments are those that torch has for a kind of device, as in `torch.cuda`."""

    def replace(**functions: Any) -> None:
        monkeypatch.setattr(torch, "get_device_module", lambda kind: SimpleNamespace(**functions))

    return replace
