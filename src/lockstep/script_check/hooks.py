"""Attaches a `Recorder` to torch in this process, and sends its records to the launcher."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from lockstep.diagnosis.torch_hooks import attach
from lockstep.files.output import send_line
from lockstep.script_check.recorder import Limits, Recorder, before

MARK = "lockstep check: "  # begins a line with a record
EXCHANGES = (
    *("all_reduce", "reduce", "all_gather", "all_gather_object", "gather", "gather_object", "reduce_scatter"),
    *("all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all", "all_to_all_single", "isend", "send"),
)
COPIES = ("broadcast", "scatter")


def record(rank: int, limits: Limits, send: Callable[[dict[str, Any]], None]) -> Recorder:
    """Record this program from now on; `send` receives each record."""
    import torch

    recorder = Recorder(rank, limits, send)
    attach(recorder)
    torch.save = before(torch.save, recorder.guard(recorder.is_saved))
    _watch_modules(recorder)
    _watch_exchanges(recorder)
    sys.addaudithook(partial(_count_files, recorder))
    return recorder


def record_for_launcher(rank: int, settings: str) -> None:
    """Record this program for the launcher, which has set `lockstep.diagnosis.CHECK`."""
    steps, seconds = settings.split(",")
    record(rank, Limits(int(steps), float(seconds)), partial(send_line, MARK))


def _watch_modules(recorder: Recorder) -> None:
    """Replace the call of modules: torch's hooks of all modules do not receive arguments passed by name."""
    from torch.nn import functional
    from torch.nn.modules import module

    modules: Any = module.Module
    call, entropy = modules.__call__, functional.cross_entropy
    begins, ends = recorder.guard(recorder.call_begins), recorder.guard(recorder.call_ends)
    taken = recorder.guard(recorder.entropy_is_taken)

    @functools.wraps(call)
    def recorded_call(self: Any, *inputs: Any, **named: Any) -> Any:
        begins(self, inputs, named)
        try:
            return call(self, *inputs, **named)
        finally:
            ends()

    @functools.wraps(entropy)
    def recorded_entropy(input: Any, target: Any, *arguments: Any, **named: Any) -> Any:
        ignored = named.get("ignore_index", arguments[2] if len(arguments) > 2 else -100)
        reduction = named.get("reduction", arguments[4] if len(arguments) > 4 else "mean")
        taken(input, target, ignored, reduction)
        return entropy(input, target, *arguments, **named)

    modules.__call__, functional.cross_entropy = recorded_call, recorded_entropy
    modules.load_state_dict = before(modules.load_state_dict, recorder.guard(recorder.weights_are_loaded))


def _watch_exchanges(recorder: Recorder) -> None:
    """Count calls that may exchange the results of an evaluation."""
    from torch import distributed

    if not distributed.is_available():
        return
    exchanged, joined = recorder.guard(recorder.results_are_exchanged), recorder.guard(recorder.joins)
    copied = recorder.guard(recorder.is_copied)
    for name in (*EXCHANGES, *COPIES):
        function = before(getattr(distributed, name), copied if name in COPIES else exchanged)
        setattr(distributed, name, function)
        setattr(distributed.distributed_c10d, name, function)  # the operations that P2POp allows
    from torch.distributed import _functional_collectives

    others = [(distributed.ProcessGroup, "allreduce"), (_functional_collectives, "all_reduce")]
    for owner, name in [*others, *((distributed.Store, name) for name in ("set", "add", "append", "compare_set"))]:
        setattr(owner, name, before(getattr(owner, name), exchanged))
    from torch.distributed.algorithms.join import Join

    Join.__enter__ = before(Join.__enter__, joined)  # type: ignore[method-assign]


def _count_files(recorder: Recorder, event: str, details: Any) -> None:
    """Receive an audit event of Python."""
    recorder.files += event == "open" and isinstance(details[1], str) and not set("wax+").isdisjoint(details[1])
