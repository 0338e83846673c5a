"""A request for one collective: what must match on all workers, how to execute it, and its future result.

Each kind is a subclass: all-reduces in `fusion`, agreements in `hvd.process_sets`, the others beside their functions in
`hvd.ops`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Any, ClassVar, NamedTuple, Self

import torch

from lockstep.hvd.engine.transfers import SetConnections
from lockstep.hvd.exceptions import HorovodInternalError
from lockstep.world import accelerator

Description = dict[str, Any]  # JSON: one worker's description of its request

AVERAGE, SUM, ADASUM, MIN, MAX, PRODUCT = range(6)
OPERATION_NAMES = ("Average", "Sum", "Adasum", "Min", "Max", "Product")
REDUCED_TYPES = frozenset(
    {torch.int32, torch.int64, torch.float16, torch.float32, torch.float64, torch.bfloat16, torch.bool}
)
MOVED_TYPES = REDUCED_TYPES | {  # as bytes
    *(torch.uint8, torch.int8, torch.int16, torch.uint16, torch.uint32, torch.uint64),
    *(torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
}

logger = logging.getLogger("lockstep.hvd")
_other_devices: set[int] = set()  # that were this process's current one, and are not its tensors'


@lru_cache(100_000)  # every training step has the same keys
def _digest(key: Any) -> bytes:
    """Return an 8-byte hash of a key."""
    return blake2b(repr(key).encode(), digest_size=8).digest()


def _make_current(device: torch.device) -> None:
    """Make the tensors' device this thread's current one: events that end elsewhere occupy memory of GPU 0."""
    before = accelerator.make_current(device)
    if before is not None and before not in _other_devices:
        _other_devices.add(before)
        logger.warning(
            "the current device was %s:%d, but the tensors are on %s, which is now the current one; call "
            "torch.accelerator.set_device_index(hvd.local_rank()) after hvd.init()",
            device.type,
            before,
            device,
        )


class Reduction(NamedTuple):
    """How tensors are reduced: the operation (AVERAGE to PRODUCT), and the factors before and after it."""

    operation: int
    prescale: float
    postscale: float


class Members(NamedTuple):
    """The parameters whose tensors a request fuses, in order: the same on all workers, or the request fails.

    Attributes:
        key: Matches the request between workers in place of its name, which may contain the names of parameters.
        names: The parameters' names.
        digest: Of `names`, so that they are not hashed in every step.
        label: For reports and the timeline.
    """

    key: str
    names: tuple[str, ...]
    digest: bytes
    label: str

    @classmethod
    def of(cls, key: str, names: Sequence[str]) -> Members:
        label = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]} ({len(names)} tensors)"
        return cls(key, tuple(names), _digest(tuple(names)), label)


class Collective:
    """A named request of this worker, submitted to a channel. This base class only waits until all workers agree.

    Args:
        name: The name that matches the request between workers, without the kind.
        tensors: The tensors to operate on.
        terms: Other values that must be the same on all workers, as JSON types.
        grouped: Whether the result is a tuple with one tensor for each in `tensors`.
        in_place: Whether the results are written to `tensors`.
        urgent: Whether a thread waits for the result, so that the round must start without delay.
        sent_dtype: The dtype to which tensors are converted for sending; None sends them as they are.
        revocable: Whether the engine may give the request back, unexecuted, if every worker waits for another one.
        late: Whether this worker is past the point at which other workers may have submitted the request as revocable.
        members: The parameters that the tensors belong to, if only their order tells.

    Attributes:
        kind: Horovod's name of the collective.
        dtypes: The supported dtypes.
        free_rows: Whether the first dimension of the tensors may differ between workers.
        joinable: Whether a worker that has joined takes part, with zeros. `terms` are then the only other arguments
            of the constructor.
        awaited: Whether a thread is blocked in `wait`.
        given_back: Whether the request has finished unexecuted; its tensors are unchanged.
        has_late_peer: Whether another worker has submitted it, or a request beside it, as late.
    """

    kind: ClassVar[str]
    dtypes: ClassVar[frozenset[torch.dtype]] = MOVED_TYPES
    free_rows: ClassVar[bool] = False
    joinable: ClassVar[bool] = False
    _kinds: ClassVar[dict[str, type[Collective]]] = {}

    def __init_subclass__(cls, kind: str = "") -> None:
        if kind:
            cls.kind = kind
            Collective._kinds[kind] = cls

    def __init__(
        self,
        name: str,
        tensors: Sequence[torch.Tensor] = (),
        terms: tuple[Any, ...] = (),
        *,
        grouped: bool = False,
        in_place: bool = False,
        urgent: bool = False,
        sent_dtype: torch.dtype | None = None,
        revocable: bool = False,
        late: bool = False,
        members: Members | None = None,
    ) -> None:
        self.name = f"{self.kind}.{name}"
        self.members = members
        self.tensors = tensors
        self.terms = terms
        self.grouped = grouped
        self.in_place = in_place
        self.urgent = urgent
        self.revocable = revocable
        self.late = late
        self.awaited = self.given_back = self.has_late_peer = False
        self.sent_dtypes = [sent_dtype or tensor.dtype for tensor in tensors]
        self.size_bytes = sum([t.numel() * dtype.itemsize for t, dtype in zip(tensors, self.sent_dtypes, strict=True)])
        self.channel: Any = None  # to which it was submitted
        self.stream: Any = None  # the accelerator's stream that writes the tensors
        self.written: Any = None  # an event on that stream: the tensors are written
        self.ready: Any = None  # an event on the set's stream: the results are written
        self.submitted = time.monotonic()
        self.error: str | None = None
        self.result: Any = None
        self.finished = False
        self.waiting = threading.Lock()
        self.waiting.acquire()
        free = self.free_rows
        signature = (
            self.kind,
            tuple(
                [
                    (dtype, t.is_cpu, t.dim(), t.shape[1:] if free else t.shape)
                    for t, dtype in zip(tensors, self.sent_dtypes, strict=True)
                ]
            ),
            terms,
            grouped,  # a group is never fused with others
            members and members.digest,
        )
        self.key = _digest(members.key if members else self.name)
        self.entry = self.key + _digest(signature)

    @property
    def fused_by(self) -> Reduction | None:
        """The reduction that requests must share to be fused with this one; None if it cannot be fused."""
        return None

    def execute(self, links: SetConnections) -> Any:
        """Execute the request with the other workers, and return the result."""
        return None

    @classmethod
    def execute_all(cls, batch: Sequence[Any], links: SetConnections) -> list[Any]:
        """Execute fused requests of this kind as one, and return their results."""
        return [request.execute(links) for request in batch]

    @classmethod
    def difference(cls, terms: Sequence[Any], others: Sequence[Any]) -> str:
        """Return how the terms of two workers differ, as text after "Mismatched"; empty if they are equal."""
        return ""

    def follow_stream(self) -> None:
        """Order the request after the work that this thread has queued on the tensors' accelerator.

        Raises:
            ValueError: That work is being captured into a graph, which cannot contain the collective.
        """
        device = self.tensors[0].device
        if accelerator.is_capturing(device):
            raise ValueError(
                f"{self.name} cannot be captured into a graph, since the workers agree on each collective at run time; "
                "capture only the forward and backward passes, without a DistributedOptimizer, and reduce after replay"
            )
        _make_current(device)
        self.stream = accelerator.current_stream(device)
        self.written = self.stream.record_event()

    @property
    def done(self) -> bool:
        if not self.finished:
            return False
        return self.ready is None or bool(self.ready.query())

    def finish(self, result: Any = None, error: str | None = None, given_back: bool = False) -> None:
        """Set the result or the error, and wake the waiting thread. Called once."""
        self.result = result
        self.error = error
        self.given_back = given_back
        self.finished = True
        self.waiting.release()

    def wait(self) -> Any:
        """Wait until the request has finished, and return the result (None if it was given back).

        Raises:
            HorovodInternalError: The collective failed.
        """
        step_times = self.channel.step_times
        step_times.pause()
        self.awaited = True
        try:
            with self.waiting:
                pass
            if self.error is not None:
                raise HorovodInternalError(self.error)
            if self.ready is not None:
                self._use_on_this_stream()
        finally:
            self.awaited = False
            step_times.resume()
        return self.result

    def _use_on_this_stream(self) -> None:
        """Order this thread's stream after the collective; the host does not wait."""
        stream = accelerator.current_stream(self.tensors[0].device)
        stream.wait_event(self.ready)
        if self.in_place and stream == self.stream:
            return  # the memory belongs to this stream, which now waits for the collective
        results = self.result if isinstance(self.result, (list, tuple)) else [self.result]
        for tensor in results:
            if isinstance(tensor, torch.Tensor) and not tensor.is_cpu:
                tensor.record_stream(stream)

    def describe(self) -> Description:
        """Describe the request for other workers, to compare it with theirs or to take part with zeros."""
        return {
            "name": self.name,
            "kind": self.kind,
            "grouped": self.grouped,
            "dtypes": [str(dtype).removeprefix("torch.") for dtype in self.sent_dtypes],
            "devices": ["CPU" if tensor.is_cpu else "GPU" for tensor in self.tensors],
            "shapes": [list(tensor.shape) for tensor in self.tensors],
            "terms": self.terms,
            "members": self.members.names if self.members else [],
        }

    @classmethod
    def of_zeros(cls, description: Description, device: torch.device) -> Self:
        """Create the request of a worker that has joined, with zeros in place of the other workers' tensors.

        Raises:
            ValueError: The others reduce GPU tensors, and this worker has no GPU.
        """
        if "GPU" in description["devices"] and device.type == "cpu":
            raise ValueError(
                "the other workers reduce GPU tensors, but this worker, which has joined, has no GPU; make one visible"
            )
        tensors = [
            torch.zeros(shape, dtype=getattr(torch, dtype), device=device if where == "GPU" else "cpu")
            for shape, dtype, where in zip(
                description["shapes"], description["dtypes"], description["devices"], strict=True
            )
        ]
        name = description["name"].partition(".")[2]
        request = cls(name, tensors, *description["terms"], grouped=description["grouped"])
        if any(not tensor.is_cpu for tensor in tensors):
            request.follow_stream()
        return request


def kind_of(description: Description) -> type[Collective]:
    """Return the class of the described request."""
    return Collective._kinds[description["kind"]]


class ReducingCollective(Collective):
    """A request of a collective that reduces.

    Args:
        operation: AVERAGE to PRODUCT.
        prescale: Multiplies the tensors before the reduction.
        postscale: Multiplies the results.
    """

    dtypes = REDUCED_TYPES

    def __init__(
        self,
        name: str,
        tensors: Sequence[torch.Tensor],
        operation: int = SUM,
        prescale: float = 1.0,
        postscale: float = 1.0,
        **options: Any,
    ) -> None:
        # Python numbers: 2, 2.0 and NumPy's 2.0 must have the same signature.
        self.reduction = Reduction(int(operation), float(prescale), float(postscale))
        super().__init__(name, tensors, self.reduction, **options)

    @classmethod
    def difference(cls, terms: Sequence[Any], others: Sequence[Any]) -> str:
        mine, theirs = Reduction(*terms), Reduction(*others)
        if mine.operation != theirs.operation:
            names = OPERATION_NAMES[mine.operation], OPERATION_NAMES[theirs.operation]
            return f"reduction operation: One rank specified {names[0]}, but another rank specified {names[1]}."
        if mine != theirs:
            return (
                f"prescale and/or postscale factors: One rank sent factors {mine[1:]}, but another rank sent factors "
                f"{theirs[1:]}."
            )
        return ""
