"""Records what this worker trains and on what, for `lockstep check`; attached by `lockstep.world.autoload`.

It changes no result: it draws no random number, and makes no collective. It makes steps slower, because it hashes
weights, gradients and samples on the CPU. After the wanted steps, it ends the program with exit code 0.

Records, each one line: `optimizer` (its parameters, once), `step` (each outermost call of an optimizer's step),
`epoch` (each pass of a DataLoader), `losses` (of an optimizer's steps, at the end) and `end`.
"""

from __future__ import annotations

import functools
import os
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from lockstep.diagnosis.publisher import exit_early
from lockstep.diagnosis.torch_hooks import steps_on_stack
from lockstep.script_check import fingerprints
from lockstep.script_check.fingerprints import line_of_script
from lockstep.script_check.parameters import has_hvd, is_joined, is_sharded, managed_by, parameters_of, settings_of
from lockstep.script_check.passes import PassRecorder

if TYPE_CHECKING:
    import torch

MIN_BYTES = 4  # of an element of weights that are not rounded
LOCAL_SGD = {"accelerate.local_sgd", "torchft.local_sgd"}
WAIT_SECONDS = 10.0  # for the other workers of the host to record as many steps
# The nodes of autograd whose loss is a mean over the batch, with nothing after it.
MEANS = ("NllLoss", "MseLoss", "L1Loss", "BinaryCrossEntropy", "MeanBackward", "SmoothL1", "HuberLoss", "KlDiv")


@dataclass(frozen=True)
class Limits:
    """When a program has been seen long enough: after `steps`, `seconds` or `epochs`, whichever comes first."""

    steps: int
    seconds: float
    epochs: int = 2


@dataclass
class SinceStep:
    """What has been seen since the step before; the fields are those of a step's record."""

    bare_call: str = ""  # the line of a call that bypasses DDP
    inputs: list[str] = field(default_factory=list)  # of the model
    modes: str = ""  # of the modules of the last model before a backward pass: 1: training
    files: list[tuple[str, str]] = field(default_factory=list)  # that were saved: the line, and host and path
    saved: tuple[str, str] = ("", "")  # where batch norm's running averages were saved, and their fingerprint
    before: str = ""  # the weights
    gradients: list[str | None] = field(default_factory=list)
    projection: float = 0.0  # of the gradients
    losses: int = 0
    loss: float | None = 0.0  # their sum; None if one is not a number
    is_mean: bool = True  # each was a mean over a batch, with nothing after it
    no_sync: str = ""  # the line of a backward pass within DDP's no_sync
    targets: int = 0  # that count in cross-entropy losses that are means
    is_random: bool = False  # random numbers were drawn between the model's call and a backward pass
    is_rounded: bool = False  # computed in 16 bits


class CommonEnd:
    """Ends the workers of a process group after the same step, since a step waits for all of them.

    The first to have seen enough tells the others, by the group's store, before its part of the last step.
    """

    KEY = "lockstep check ends after step"

    def __init__(self) -> None:
        from torch import distributed

        self._group: Any = distributed if distributed.is_available() else None
        # As it is now: later calls are counted as the program's.
        self._set: Any = distributed.Store.compare_set if distributed.is_available() else None

    def announce(self, step: int) -> None:
        if store := self._store():
            self._set(store, self.KEY, "", str(step))

    def is_after(self, step: int) -> bool:
        """Return whether a worker has announced that this step, or an earlier one, is the last."""
        store = self._store()
        return store is not None and store.check([self.KEY]) and step >= int(store.get(self.KEY))

    def _store(self) -> Any:
        is_joined = self._group is not None and self._group.is_initialized()
        return self._group.distributed_c10d._get_default_store() if is_joined else None


class Recorder(PassRecorder):
    """Sends a record of each optimizer and of each of its steps, besides those of loaders."""

    def __init__(self, rank: int, limits: Limits, send: Callable[[dict[str, Any]], None]) -> None:
        super().__init__(rank, send)
        self._limits, self._began, self._common_end = limits, time.monotonic(), CommonEnd()
        self._depth = threading.local()
        self._optimizers: dict[Any, int] = {}  # their numbers
        self._names: dict[int, str] = {}  # of parameters, by id
        self._wrapped: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # inner modules of DDP
        self._managed: set[int] = set()  # ids of the parameters of DDP
        self._wrappers: list[weakref.ref[Any]] = []
        self._since = SinceStep()
        self._local: dict[Any, float] = {}  # of each optimizer, its gradients' projection after the backward pass
        self._outer: list[int] = []  # ids of the parameters of the optimizer that steps
        self._step = 0
        self._last_exchanges = 0  # calls that exchange tensors, before the last step
        self._joins = False
        self._norms: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()  # with running averages
        self._states: dict[str, str] = {}  # of generators of random numbers, before the model's first call in a step
        self._loads: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()  # lines that loaded weights
        self._copies = False  # tensors from one worker to others
        self._operations: set[str] = set()  # in the graphs of the losses since the last step
        self._graphs: dict[int, tuple[set[str], set[str]]] = {}  # by optimizer: those of each step, and of any
        self._loss_line = ""
        self._modes, self._has_fsdp = "", False  # of the modules of the last model called; whether it is FSDP's

    def hook_fails(self, error: Exception) -> None:
        self.send("end", error=f"{type(error).__name__}: {error}")

    def wrapper_is_made(self, wrapper: Any, module: Any) -> None:
        for inner in module.modules():
            self._wrapped[inner] = weakref.ref(wrapper)
        self._wrappers.append(weakref.ref(wrapper))
        self._managed.update(map(id, managed_by(wrapper, module)))

    def call_begins(self, module: Any, inputs: Any, named: Any) -> None:
        import torch

        level = self._depth.calls = getattr(self._depth, "calls", 0) + 1
        self.calls += level == 1
        module = getattr(module, "_orig_mod", module)  # of a compiled one
        self._is_in_shards |= level == 1 and _is_fsdp(module)
        if level > 1 or not torch.is_grad_enabled():
            return
        if module in self._wrapped and any(parameter.requires_grad for parameter in module.parameters()):
            self._since.bare_call = self._since.bare_call or line_of_script()
        for name, parameter in module.named_parameters():
            self._names.setdefault(id(parameter), name.removeprefix("module.").removeprefix("_orig_mod."))
        self._has_fsdp |= _is_fsdp(module)
        self._norms.update((each, None) for each in module.modules() if getattr(each, "running_mean", None) is not None)
        self._states = self._states or fingerprints.of_random_states()
        self._modes = "".join(str(int(each.training)) for each in module.modules())
        self._since.is_rounded |= any(
            parameter.dtype.itemsize < MIN_BYTES or torch.is_autocast_enabled(parameter.device.type)
            for parameter in module.parameters()
        )
        if module.training:
            self._since.inputs += fingerprints.of_samples((inputs, named))

    def call_ends(self) -> None:
        self._depth.calls = max(0, getattr(self._depth, "calls", 0) - 1)
        self._is_in_shards &= self._depth.calls > 0

    def backward_begins(self, loss: torch.Tensor | None) -> None:
        super().backward_begins(loss)
        seen = self._since
        seen.losses += 1
        self._operations |= fingerprints.of_graph(loss)
        self._loss_line = line_of_script()
        if self._has_seen_enough():
            self._common_end.announce(self._step + 1)
        if loss is None or loss.numel() > 1 or seen.loss is None:
            seen.loss = None
        else:
            seen.loss += float(loss.detach())
        node = getattr(getattr(loss, "grad_fn", None), "name", lambda: "")()
        seen.is_mean &= node.startswith(MEANS)
        seen.modes = self._modes
        seen.is_random |= bool(self._states) and self._states != fingerprints.of_random_states()
        self._states = {}

    def backward_ends(self) -> None:
        wrappers = [wrapper for each in self._wrappers if (wrapper := each()) is not None]
        is_alone = wrappers and not any(wrapper.require_backward_grad_sync for wrapper in wrappers)
        self._since.no_sync = line_of_script() if is_alone else ""
        if not has_hvd():
            for optimizer in self._optimizers:
                self._local[optimizer] = fingerprints.project(_gradients(parameters_of(optimizer)))

    def entropy_is_taken(self, logits: Any, target: Any, ignored: int, reduction: str) -> None:
        import torch

        if reduction == "mean" and torch.is_grad_enabled() and logits.requires_grad and not target.is_floating_point():
            self._since.targets += int((target != ignored).sum())

    def step_begins(self, optimizer: Any) -> None:
        # Counted, because torch runs no post hook if a call raised.
        level = self._depth.steps = steps_on_stack() if getattr(self._depth, "steps", 0) else 1
        parameters = parameters_of(optimizer)
        if level == 1:
            self._since.before = fingerprints.digest(*map(fingerprints.of_tensor, map(_whole, parameters)))
            if optimizer not in self._optimizers:
                self._introduce(optimizer, parameters)
            self._outer = [id(parameter) for parameter in parameters]
        elif [id(parameter) for parameter in parameters] != self._outer:  # of a part of the optimizer
            return
        gradients = _gradients(parameters)
        self._since.projection = fingerprints.project(gradients)
        self._since.gradients = [None if each is None else fingerprints.of_tensor(each) for each in gradients]

    def weights_are_loaded(self, module: Any, *_: Any, **__: Any) -> None:
        self._loads[module] = line_of_script()

    def is_copied(self, tensor: Any = None, *_: Any, **__: Any) -> None:
        self._copies |= hasattr(tensor, "is_floating_point") and tensor.is_floating_point()

    def _introduce(self, optimizer: Any, parameters: list[Any]) -> None:
        if not self._optimizers:
            self._watch_hvd()
        ids = set(map(id, parameters))
        loads = [line for module, line in self._loads.items() if not ids.isdisjoint(map(id, module.parameters()))]
        self._optimizers[optimizer] = len(self._optimizers)
        self.send(
            "optimizer",
            optimizer=self._optimizers[optimizer],
            line=line_of_script(),
            names=[self._names.get(id(each), f"parameter {place}") for place, each in enumerate(parameters)],
            shapes=[list(each.shape) for each in parameters],
            sharded=[is_sharded(each) for each in parameters],
            managed=[id(each) in self._managed for each in parameters],
            has_wrapper=bool(self._wrappers),
            has_shards=self._has_fsdp and all(_has_one_axis(each) for each in parameters),
            has_hvd=has_hvd(),
            has_local_sgd=not LOCAL_SGD.isdisjoint(sys.modules),
            joined=is_joined(),
            loaded=loads[0] if loads else "",
            copies=self._copies,
            weights=[fingerprints.of_tensor(_whole(each)) for each in parameters],
        )

    def _watch_hvd(self) -> None:
        """Count hvd's collectives from the first step on; a program that uses hvd has imported it by then."""
        channel = getattr(sys.modules.get("lockstep.hvd.engine.channel"), "Channel", None)
        if channel is not None:
            channel.submit = before(channel.submit, self.guard(self.results_are_exchanged))

    def step_ends(self, optimizer: Any) -> None:
        from torch.nn import SyncBatchNorm

        self._depth.steps = max(0, getattr(self._depth, "steps", 0) - 1)
        if self._depth.steps:
            return
        self._step += 1
        self.last_optimizer = self._optimizers[optimizer]
        self.send(
            "step",
            optimizer=self.last_optimizer,
            line=line_of_script(),
            weights=[fingerprints.of_tensor(_whole(each)) for each in parameters_of(optimizer)],
            local=self._local.get(optimizer),
            settings=[settings_of(group) for group in optimizer.param_groups],
            joins=self._joins,
            exchanges=self.exchanges - self._last_exchanges,
            averages=self._averages(),
            has_batch_norm=any(norm.training and not isinstance(norm, SyncBatchNorm) for norm in self._norms),
            **asdict(self._since),
        )
        always, ever = self._graphs.get(self.last_optimizer, (self._operations, set()))
        self._graphs[self.last_optimizer] = always & self._operations, ever | self._operations
        self._since, self._last_exchanges, self._operations = SinceStep(), self.exchanges, set()
        is_enough = self._has_seen_enough()
        is_alone = is_enough and not is_joined()
        if self._step >= self._limits.steps or self._common_end.is_after(self._step) or is_alone:
            self.finish()
            exit_early(WAIT_SECONDS)
        if is_enough:  # since its backward pass, or without one of torch
            self._common_end.announce(self._step + 1)

    def _has_seen_enough(self) -> bool:
        seconds = time.monotonic() - self._began
        return self.epochs >= self._limits.epochs or seconds > self._limits.seconds

    def joins(self, *_: Any, **__: Any) -> None:
        self._joins = True

    def _averages(self) -> str:
        """Return the fingerprint of all running averages; "" without any."""
        found = [fingerprints.of_tensor(norm.running_mean) for norm in self._norms]
        return fingerprints.digest(*found) if found else ""

    def is_saved(self, obj: Any = None, f: Any = None, *_: Any, **__: Any) -> None:
        name = getattr(f, "name", f)
        if isinstance(name, (str, os.PathLike)) and os.fspath(name) != os.devnull:
            self.files += 1
            self._since.files.append((line_of_script(), f"{socket.gethostname()}:{os.path.realpath(name)}"))
        if self._norms and _has_averages(obj):
            self._since.saved = (line_of_script(), self._averages())

    def finish(self) -> None:
        """Send what is left, at the end of the program."""
        if self._is_off:
            return
        super().finish()
        for number, graphs in self._graphs.items():
            always, ever = map(sorted, graphs)
            self.send("losses", optimizer=number, line=self._loss_line, always=always, ever=ever)
        self.send("end", error="", files=self._since.files)
        self._is_off = True


def before(function: Callable[..., Any], hook: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, which calls `hook` first, with the same arguments."""

    @functools.wraps(function)
    def recorded(*arguments: Any, **named: Any) -> Any:
        hook(*arguments, **named)
        return function(*arguments, **named)

    return recorded


def _gradients(parameters: list[Any]) -> list[Any]:
    """Return the whole gradient of each parameter; None if there is none, or each worker has a part of it."""
    return [None if each.grad is None or is_sharded(each) else each.grad for each in parameters]


def _is_fsdp(module: Any) -> bool:
    from torch.distributed import fsdp

    return isinstance(module, (fsdp.FSDPModule, fsdp.FullyShardedDataParallel))


def _has_one_axis(parameter: Any) -> bool:
    """Whether no distributed tensor also has parts for tensor parallelism."""
    mesh = getattr(parameter, "device_mesh", None)
    return mesh is None or mesh.ndim == 1


def _has_averages(content: Any, depth: int = 0) -> bool:
    """Whether what is saved has a module's running averages."""
    import torch

    if isinstance(content, Mapping) and depth < fingerprints.MAX_DEPTH:
        return any(str(key).endswith("running_mean") or _has_averages(content[key], depth + 1) for key in content)
    return isinstance(content, torch.nn.Module)


def _whole(parameter: Any) -> Any:
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter
