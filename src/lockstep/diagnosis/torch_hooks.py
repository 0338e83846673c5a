"""Hooks of torch in this process: optimizers, backward passes and loaders, for what observes programs."""

from __future__ import annotations

import atexit
import functools
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import FrameType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

if TYPE_CHECKING:
    import torch

OPTIMIZERS = os.path.join("torch", "optim", "optimizer.py")
P = ParamSpec("P")
T = TypeVar("T")


class TorchHooks:
    """Receives what this process does with torch, and changes nothing of it. Each method is called by a hook."""

    _is_off = False

    def step_begins(self, optimizer: Any) -> None:
        """Called before each call of an optimizer's `step`, which may be within another one's."""

    def step_ends(self, optimizer: Any) -> None:
        """Called after each call that raised no exception."""

    def backward_begins(self, loss: torch.Tensor | None) -> None:
        """Called before a backward pass, with the first of its tensors; None if that needs no gradient."""

    def backward_ends(self) -> None:
        """Called after a backward pass, also if it raised an exception."""

    def batch_is_requested(self, iterator: Any, indices: Sequence[Any] | None) -> None:
        """Called with the indices of a loader's next batch; None if the batch itself tells its samples."""

    def batch_is_awaited(self, has_gradients: bool) -> None:
        """Called before a loader delivers a batch; `has_gradients`: whether autograd is on."""

    def batch_arrives(self, iterator: Any, batch: Any, has_gradients: bool) -> None:
        """Called after a loader has delivered a batch."""

    def batch_fails(self, iterator: Any) -> None:
        """Called if a loader cannot deliver a batch; the program may go on with the next one."""

    def loader_ends(self, iterator: Any) -> None:
        """Called after a loader's last batch."""

    def loader_is_reset(self, iterator: Any) -> None:
        """Called before an iterator starts again, and by some before they start."""
        self.loader_ends(iterator)

    def wrapper_is_made(self, wrapper: Any, module: Any) -> None:
        """Called after DistributedDataParallel has wrapped a module."""

    def module_is_compiled(self) -> None:
        """Called when torch.compile wraps a module."""

    def finish(self) -> None:
        """Called at the program's exit."""

    def hook_fails(self, error: Exception) -> None:
        """Called after the first error of a hook, which turns all of them off."""
        print(f"lockstep: this worker is not observed any more: {error!r}", file=sys.stderr)

    @property
    def is_off(self) -> bool:
        return self._is_off

    def turn_off(self) -> None:
        self._is_off = True

    def guard(self, hook: Callable[P, Any]) -> Callable[P, Any]:
        """Return a hook that does nothing while torch compiles, or once one has failed."""

        is_compiling = sys.modules["torch"].compiler.is_compiling

        def guarded(*arguments: P.args, **named: P.kwargs) -> Any:
            if is_compiling() or self._is_off:
                return None
            try:
                hook(*arguments, **named)
            except Exception as error:
                if _is_of_a_signal(error):
                    raise
                self.turn_off()
                self.hook_fails(error)
            return None

        return keep_eager(guarded, and_callees=True)


def _is_of_a_signal(error: Exception) -> bool:
    """Whether a handler of a signal, which may come at any time, has raised this exception."""
    handlers = map(signal.getsignal, signal.valid_signals())
    codes = {getattr(handler, "__code__", None) for handler in handlers}
    return any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__))


def keep_eager(function: Callable[P, T], and_callees: bool = False) -> Callable[P, T]:
    """Keep torch.compile from compiling calls of a function by themselves, as it keeps from those of torch's own."""
    with suppress(AttributeError, TypeError):  # private names: without them, only steps that are compiled are slower
        compiler = sys.modules["torch"]._C._dynamo.eval_frame
        action = compiler._FrameAction
        strategy = compiler._FrameExecStrategy(action.SKIP, action.SKIP if and_callees else action.DEFAULT)
        compiler.set_code_exec_strategy(cast(Any, function).__code__, strategy)
    return function


def before_calls(hook: Callable[[Any], Any]) -> Any:
    """Call a hook before modules are called, until the returned handle is removed; None in programs that compile."""
    compiler = sys.modules.get("torch._dynamo.utils")
    if compiler is not None and getattr(compiler, "counters", {"frames": True}).get("frames"):
        return None  # the graphs depend on such hooks
    torch = sys.modules["torch"]

    def called(module: Any, _: Any) -> None:  # without `keep_eager`, which would break a graph
        if not torch.compiler.is_compiling():
            hook(module)

    return torch.nn.modules.module.register_module_forward_pre_hook(called)


def steps_on_stack() -> int:
    """Return the number of calls of optimizers' `step` in this thread, by the wrapper that calls their hooks."""
    frame: FrameType | None = sys._getframe()
    number = 0
    while frame is not None:
        number += frame.f_code.co_name == "wrapper" and frame.f_code.co_filename.endswith(OPTIMIZERS)
        frame = frame.f_back
    return number


def attach(hooks: TorchHooks) -> None:
    """Call the methods from now on, in this process but not in those that it forks."""
    _watch_optimizers(hooks)
    _watch_backward(hooks)
    _watch_loaders(hooks)
    _watch_wrappers(hooks)
    os.register_at_fork(after_in_child=hooks.turn_off)
    atexit.register(hooks.guard(hooks.finish))


def _watch_optimizers(hooks: TorchHooks) -> None:
    from torch.optim import optimizer as optimizers

    before, after = hooks.guard(hooks.step_begins), hooks.guard(hooks.step_ends)
    optimizers.register_optimizer_step_pre_hook(keep_eager(lambda optimizer, *_: before(optimizer)))
    optimizers.register_optimizer_step_post_hook(keep_eager(lambda optimizer, *_: after(optimizer)))


def _watch_backward(hooks: TorchHooks) -> None:
    """Replace `torch.autograd.backward`, for which torch has no hook; `Tensor.backward` calls it, too."""
    import torch

    backward = torch.autograd.backward
    before, after = hooks.guard(hooks.backward_begins), hooks.guard(hooks.backward_ends)

    @functools.wraps(backward)
    def observed(tensors: Any, *arguments: Any, **named: Any) -> None:
        loss = tensors
        if not isinstance(tensors, torch.Tensor):
            if not isinstance(tensors, (list, tuple)):  # an iterator, of which the first could be read only once
                tensors = tuple(tensors)
            loss = tensors[0] if tensors else None
        before(loss if isinstance(loss, torch.Tensor) and loss.requires_grad else None)
        try:
            backward(tensors, *arguments, **named)
        finally:
            after()

    torch.autograd.backward = keep_eager(observed)
    with suppress(Exception):  # a private name: TorchScript finds the replaced function by itself
        torch.jit._builtins._register_builtin(observed, "aten::backward")


def _watch_wrappers(hooks: TorchHooks) -> None:
    from torch.nn.modules.module import register_module_module_registration_hook
    from torch.nn.parallel import DistributedDataParallel

    made, compiled = hooks.guard(hooks.wrapper_is_made), hooks.guard(hooks.module_is_compiled)

    def registered(owner: Any, name: str, module: Any) -> None:
        if name == "module" and module is not None and isinstance(owner, DistributedDataParallel):
            made(owner, module)
        elif name == "_orig_mod":  # of OptimizedModule, whose class is imported with the compiler
            compiled()

    register_module_module_registration_hook(keep_eager(registered))


def _watch_loaders(hooks: TorchHooks) -> None:
    """Replace three methods of DataLoader's iterators, which have no hooks."""
    import torch
    from torch.utils.data import _DatasetKind, dataloader

    iterators: Any = dataloader._BaseDataLoaderIter
    request, deliver, reset = iterators._next_index, iterators.__next__, iterators._reset
    requested, awaited = hooks.guard(hooks.batch_is_requested), hooks.guard(hooks.batch_is_awaited)
    arrived, failed = hooks.guard(hooks.batch_arrives), hooks.guard(hooks.batch_fails)
    ended, was_reset = hooks.guard(hooks.loader_ends), hooks.guard(hooks.loader_is_reset)

    def observed_request(self: Any) -> Any:
        indices = request(self)
        counts = self._dataset_kind == _DatasetKind.Map and (self._auto_collation or isinstance(indices, list))
        requested(self, indices if counts else None)
        return indices

    def observed_delivery(self: Any) -> Any:
        has_gradients = torch.is_grad_enabled()
        awaited(has_gradients)
        try:
            batch = deliver(self)
        except BaseException as error:
            (ended if isinstance(error, StopIteration) else failed)(self)
            raise
        arrived(self, batch, has_gradients)
        return batch

    def observed_reset(self: Any, *arguments: Any, **named: Any) -> Any:
        was_reset(self)
        return reset(self, *arguments, **named)

    iterators._next_index, iterators.__next__ = keep_eager(observed_request), keep_eager(observed_delivery)
    iterators._reset = keep_eager(observed_reset)
