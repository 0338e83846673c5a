"""A simulated accelerator that computes nothing, but tracks the order of memory accesses.

Its tensors are torch's "meta" tensors, which have no data. Streams and host threads have vector clocks (F. Mattern,
"Virtual Time and Global States of Distributed Systems", 1989): an event carries its stream's clock, and a stream or
thread that waits for the event merges that clock into its own. Each read or write must be ordered after the last write,
each write after all reads, and memory must not be freed while another stream may still use it. A violation, which on a
GPU gives wrong results now and then, is reported here every time.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lockstep.hvd.engine.channel import Channel
from lockstep.world import accelerator

DEVICE = torch.device("meta")
Clock = dict[int, int]  # by stream: number of its operations known to have finished


def _merge(into: Clock, other: Clock) -> None:
    for stream, time in other.items():
        into[stream] = max(into.get(stream, 0), time)


class FakeStream:
    """A stand-in for a stream of lockstep.world.accelerator."""

    def __init__(self, machine: Machine, urgent: bool = False) -> None:
        self.machine = machine
        self.urgent = urgent
        self.device = DEVICE
        self.number = machine.count(self)
        self.clock: Clock = {}

    def record_event(self, event: TimedEvent | None = None) -> Clock:
        if event is not None:
            event.seconds = self.machine.seconds
        return dict(self.clock)

    def wait_event(self, event: Clock) -> None:
        _merge(self.clock, event)

    def query(self) -> bool:
        return not self.machine.stuck

    def synchronize(self) -> None:
        _merge(self.machine.host, self.clock)


class TimedEvent:
    """A stand-in for an event whose time can be read."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.seconds = 0.0

    def query(self) -> bool:
        return not self.machine.stuck

    def elapsed_time(self, end: TimedEvent) -> float:
        return 1000 * (end.seconds - self.seconds)


class Memory:
    """The streams that have used a storage, and when."""

    def __init__(self, owner: FakeStream, size_bytes: int) -> None:
        self.owner = owner
        self.size_bytes = size_bytes
        self.lent: set[FakeStream] = set()  # by record_stream
        self.written: tuple[int, int] | None = None
        self.read: Clock = {}


class Group:
    """A process group that works on a separate stream, as NCCL's do."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.stream = FakeStream(machine)
        self.ended: list[str] = []
        self.reductions: list[tuple[torch.distributed.ReduceOp, torch.dtype, int]] = []  # with numbers of elements

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> Group:
        self.reductions += [(options.reduceOp, tensor.dtype, tensor.numel()) for tensor in tensors]
        return self._work(tensors, tensors)

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> Group:
        return self._work(tensors, tensors)

    def _allgather_base(self, output: torch.Tensor, tensor: torch.Tensor) -> Group:
        return self._work([tensor], [output])

    def alltoall(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> Group:
        return self._work(inputs, outputs)

    def _work(self, reads: list[torch.Tensor], writes: list[torch.Tensor]) -> Group:
        self.stream.wait_event(self._machine.current.record_event())
        self._machine.use_memory(self.stream, reads, writes, "a collective")
        return self

    def wait(self) -> None:
        self._machine.current.wait_event(self.stream.record_event())

    def shutdown(self) -> None:
        self.ended.append("shutdown")

    def abort(self) -> None:
        self.ended.append("abort")
        self._machine.let_go()


class Machine:
    """The accelerator of one worker."""

    def __init__(self) -> None:
        self.faults: list[str] = []
        self.groups: list[Group] = []
        self._lock = threading.RLock()
        self.streams: list[FakeStream] = []
        self._memory: dict[int, Memory] = {}
        self._thread = threading.local()
        self._hosts: dict[int, Clock] = defaultdict(dict)
        self.default = FakeStream(self)
        self.seconds = 0.0  # the device's time, which passes only when a test adds to it
        self.stuck = False  # whether work waits for a dead worker until it is aborted
        self._released = threading.Event()
        self.when_let_go: Callable[[], None] = lambda: None
        self.averages = True  # whether the library should divide averages
        self.launches: dict[int, Counter[str]] = defaultdict(Counter)  # by stream and name of the operation
        self.lent = 0  # calls of record_stream
        self.live_bytes: Counter[int] = Counter()  # by the stream that allocated them
        self.peak_bytes: Counter[int] = Counter()

    def let_go(self) -> None:
        """Abort the stuck work, which then continues with incomplete data."""
        self.when_let_go()
        self.stuck = False
        self._released.set()

    def synchronize(self) -> None:
        """Make the host wait for all work."""
        if self.stuck:
            self._released.wait()
        self.current.synchronize()

    def count(self, stream: FakeStream) -> int:
        self.streams.append(stream)
        return len(self.streams)

    @property
    def host(self) -> Clock:
        """Return this thread's clock."""
        return self._hosts[threading.get_ident()]

    @property
    def current(self) -> FakeStream:
        if not getattr(self._thread, "has_device", False):
            self.fault("a thread uses the accelerator that has not set its device")
        return getattr(self._thread, "stream", self.default)

    def fault(self, text: str) -> None:
        if text not in self.faults:
            self.faults.append(text)

    def use(self, device: torch.device) -> None:
        self._thread.has_device = True

    @contextmanager
    def on(self, stream: FakeStream) -> Iterator[None]:
        before = self.current
        self._thread.stream = stream
        try:
            yield
        finally:
            self._thread.stream = before

    def group(self, *_: Any) -> Group:
        assert self.current is self.default
        self.groups.append(Group(self))
        return self.groups[-1]

    def lend(self, tensor: torch.Tensor, stream: FakeStream) -> None:
        with self._lock:
            self.lent += 1
            self._of(tensor).lent.add(stream)

    def use_memory(
        self, stream: FakeStream, reads: Iterable[torch.Tensor], writes: Iterable[torch.Tensor], what: str
    ) -> None:
        """Record one operation of a stream, and check that it is ordered after everything that it depends on."""
        with self._lock:
            self.launches[stream.number][what] += 1
            _merge(stream.clock, self.host)
            time = stream.clock[stream.number] = stream.clock.get(stream.number, 0) + 1
            read, written = [self._of(tensor) for tensor in reads], [self._of(tensor) for tensor in writes]
            for memory in (*read, *written):
                if memory.written and not self._is_done([stream], *memory.written):
                    self.fault(f"{what} may come before the last write")
            for memory in written:
                if not all(self._is_done([stream], *access) for access in memory.read.items()):
                    self.fault(f"{what} may overwrite what is still being read")
            for memory in read:
                memory.read[stream.number] = time
            for memory in written:
                memory.written, memory.read = (stream.number, time), {}

    def _is_done(self, by: Iterable[FakeStream], number: int, time: int) -> bool:
        return any(stream.clock.get(number, 0) >= time for stream in by)

    def _of(self, tensor: torch.Tensor) -> Memory:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._memory:
            memory = self._memory[key] = Memory(self.current, storage.nbytes())
            number = memory.owner.number
            self.live_bytes[number] += memory.size_bytes
            self.peak_bytes[number] = max(self.peak_bytes[number], self.live_bytes[number])
            weakref.finalize(storage, self._free, key)
        return self._memory[key]

    def _free(self, key: int) -> None:
        """Free a storage, whose memory the allocator may reuse on the stream that allocated it."""
        with self._lock:
            memory = self._memory.pop(key)
            self.live_bytes[memory.owner.number] -= memory.size_bytes
            accesses = [*memory.read.items(), *([memory.written] if memory.written else [])]
            if not all(self._is_done([memory.owner, *memory.lent], *access) for access in accesses):
                self.fault("memory is given back that another stream may still use")


class Watch(TorchDispatchMode):
    """Reports to a machine what each operation of this thread reads and writes."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self._machine = machine

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        schema = func._schema
        if any(each.alias_info and not each.alias_info.is_write for each in schema.returns):
            return result  # a view
        given = dict(zip([argument.name for argument in schema.arguments], args, strict=False)) | (kwargs or {})
        reads: list[torch.Tensor] = []
        writes: list[torch.Tensor] = []
        for argument in schema.arguments:
            changed = argument.alias_info is not None and argument.alias_info.is_write
            (writes if changed else reads).extend(_on_device(given.get(argument.name)))
        known = {tensor.untyped_storage()._cdata for tensor in (*reads, *writes)}
        writes += [tensor for tensor in _on_device(result) if tensor.untyped_storage()._cdata not in known]
        if reads or writes:
            self._machine.use_memory(self._machine.current, reads, writes, func.__name__)
        return result


def _on_device(values: Any) -> list[torch.Tensor]:
    tensors = [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
    return [tensor for tensor in tensors if tensor.device == DEVICE and tensor.layout is torch.strided]


def install() -> Machine:
    """Replace this process's accelerator with a machine, permanently."""
    machine = Machine()
    machine.use(DEVICE)
    replaced: dict[str, Any] = {
        "kind": lambda: DEVICE.type,
        "current": lambda: DEVICE,
        "overlaps": lambda device: device == DEVICE,
        "use": machine.use,
        "make_current": lambda device: None,
        "current_stream": lambda device: machine.current,
        "new_stream": lambda device, urgent=False: FakeStream(machine, urgent),
        "new_event": lambda device, timing=False: TimedEvent(machine),
        "on": machine.on,
        "is_capturing": lambda device: False,
        "card": lambda device: str(os.getpid()),
        "identity": lambda device: str(os.getpid()),
        "has_collectives": lambda kind: True,
        "averages": lambda device: machine.averages,
        "group": machine.group,
        "synchronize": lambda device=None: machine.synchronize(),
    }
    for name, function in replaced.items():
        assert hasattr(accelerator, name)
        setattr(accelerator, name, function)
    torch.Tensor.record_stream = lambda tensor, stream: machine.lend(tensor, stream)  # type: ignore[method-assign]
    work = Channel._work

    def watched(channel: Channel) -> None:
        with Watch(machine):
            work(channel)

    Channel._work = watched  # type: ignore[method-assign]
    return machine
