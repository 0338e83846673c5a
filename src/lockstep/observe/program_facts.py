"""Reads what explains the speed of a worker's program: its gradients, threads, loader, and the machine's idle cores."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import Any

import psutil

from lockstep.diagnosis.observed_steps import NO_FACTS, ProgramFacts
from lockstep.script_check.parameters import parameters_of


class FactReader:
    """Reads the gradients once, and the rest at each `read`."""

    def __init__(self) -> None:
        self._gradients = NO_FACTS
        self.begin()

    def begin(self) -> None:
        """Count the idle cores from now on."""
        self._start, self._idle = time.monotonic(), psutil.cpu_times().idle

    def read(self, optimizer: Any, wrapper: Any, cores: int, **known: Any) -> ProgramFacts:
        """Return the facts.

        Args:
            optimizer: The first optimizer that stepped, or None.
            wrapper: The newest DistributedDataParallel, or None.
            cores: The number of cores that the workers of this host may use.
            known: Other facts.
        """
        if not self._gradients.tensors and optimizer is not None:
            self._gradients = _gradients(optimizer, wrapper)
        idle = (psutil.cpu_times().idle - self._idle) / max(time.monotonic() - self._start, 1e-3)
        host: dict[str, Any] = {"cores": cores, "local_workers": int(os.environ.get("LOCAL_WORLD_SIZE") or 0)}
        return replace(self._gradients, **known, **host, free_cores=min(idle, cores))


def _gradients(optimizer: Any, wrapper: Any) -> ProgramFacts:
    trained = [each for each in parameters_of(optimizer) if each.requires_grad]
    gradients = [each if each.grad is None else each.grad for each in trained]
    size_bytes = sum(each.numel() * each.element_size() for each in gradients)
    largest = max((each.element_size() for each in gradients), default=0)
    exchange = ""
    if compression := getattr(optimizer, "_compression", None):
        exchange = "hvd" if getattr(compression, "__name__", "") == "NoneCompressor" else "hvd hook"
    elif wrapper is not None:
        exchange = "ddp hook" if getattr(wrapper, "_comm_hooks", None) else "ddp"
    return ProgramFacts(size_bytes, largest, len(gradients), exchange)
