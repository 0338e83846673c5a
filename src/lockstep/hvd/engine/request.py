"""One collective that a worker asks for: what the workers must agree on, how it is carried out, its future result.

Each kind is a subclass, in the file that has its functions: in `hvd.ops`, and in `hvd.process_sets` for agreements.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, ClassVar, Self

import torch

from lockstep.hvd.engine.exchange import Exchange
from lockstep.hvd.engine.reduction import Reduction
from lockstep.hvd.exceptions import HorovodInternalError
from lockstep.world import accelerator

Description = dict[str, Any]  # plain JSON: what one worker says of its request

REDUCED_TYPES = frozenset(
    {torch.int32, torch.int64, torch.float16, torch.float32, torch.float64, torch.bfloat16, torch.bool}
)
MOVED_TYPES = REDUCED_TYPES | {  # as bytes
    *(torch.uint8, torch.int8, torch.int16, torch.uint16, torch.uint32, torch.uint64),
    *(torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
}

_digests: dict[Any, bytes] = {}


def _digest(key: Any) -> bytes:
    """8 bytes that stand for a key; remembered, since a training step asks for the same ones again and again."""
    digest = _digests.get(key)
    if digest is None:
        if len(_digests) > 100_000:  # names that count up for ever
            _digests.clear()
        digest = _digests[key] = blake2b(repr(key).encode(), digest_size=8).digest()
    return digest


class Collective:
    """A named request of this worker, submitted to a channel. This class moves nothing: that all agree is all.

    Args:
        name: The name under which the workers match it, without the kind.
        tensors: What it works on.
        terms: What else must be the same on all workers, in plain values that JSON has.
        grouped: Whether the result is a tuple, of as many tensors as there are.
        in_place: Whether the results go into `tensors`.
        urgent: Whether somebody waits for it, so that it must not be held back for others to join it.

    Attributes:
        kind: The name of the kind, as Horovod has it.
        dtypes: Those that it takes.
        free_rows: Whether the workers' tensors may differ in rows, the first dimension.
        joinable: Whether a worker that has joined takes part, with zeros; then `terms` are all else that is needed to
            make one.
    """

    kind: ClassVar[str]
    dtypes: ClassVar[frozenset[torch.dtype]] = MOVED_TYPES
    free_rows: ClassVar[bool] = False
    joinable: ClassVar[bool] = False
    _kinds: ClassVar[dict[str, type[Collective]]] = {}

    __slots__ = (
        "channel",
        "entry",
        "error",
        "finished",
        "grouped",
        "in_place",
        "key",
        "name",
        "ready",
        "result",
        "size_bytes",
        "stream",
        "submitted",
        "tensors",
        "terms",
        "urgent",
        "waiting",
        "written",
    )

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
    ) -> None:
        self.name = f"{self.kind}.{name}"
        self.tensors = tensors
        self.terms = terms
        self.grouped = grouped
        self.in_place = in_place
        self.urgent = urgent
        self.size_bytes = sum([tensor.nbytes for tensor in tensors])
        self.channel: Any = None  # to which it was submitted
        self.stream: Any = None  # of the accelerator, on which the tensors came about
        self.written: Any = None  # an event of that stream, after which they are there
        self.ready: Any = None  # an event of the set's stream, after which the results are there
        self.submitted = time.monotonic()
        self.error: str | None = None
        self.result: Any = None
        self.finished = False
        self.waiting = threading.Lock()
        self.waiting.acquire()
        free = self.free_rows
        signature = (
            self.kind,
            tuple([(t.dtype, t.is_cpu, t.dim(), t.shape[1:] if free else t.shape) for t in tensors]),
            terms,
            grouped,  # since a group is never fused with others
        )
        self.key = _digest(self.name)
        self.entry = self.key + _digest(signature)

    @property
    def fused_by(self) -> Reduction | None:
        """What other requests must share to be reduced with this one by one call; None where none can be."""
        return None

    def execute(self, exchange: Exchange) -> Any:
        """Carry it out with the other workers, and return the result."""
        return None

    @classmethod
    def execute_all(cls, batch: Sequence[Any], exchange: Exchange) -> list[Any]:
        """Carry out requests of this kind as one, where they are fused, and return their results."""
        return [request.execute(exchange) for request in batch]

    @classmethod
    def difference(cls, terms: Sequence[Any], others: Sequence[Any]) -> str:
        """Say how the terms of two workers differ, after "Mismatched"; empty where they do not."""
        return ""

    def follow_stream(self) -> None:
        """Have the work come after what this thread has asked of the tensors' accelerator so far.

        Raises:
            ValueError: That is being captured into a graph, in which the collective would not be.
        """
        device = self.tensors[0].device
        if accelerator.is_capturing(device):
            raise ValueError(
                f"{self.name} cannot be captured into a graph, since the workers agree on it each time; capture the "
                "forward and backward passes alone, without hooks of a DistributedOptimizer, and reduce after replay"
            )
        self.stream = accelerator.current_stream(device)
        self.written = self.stream.record_event()

    @property
    def done(self) -> bool:
        if not self.finished:
            return False
        return self.ready is None or bool(self.ready.query())

    def finish(self, result: Any = None, error: str | None = None) -> None:
        """Hand over the result or the error, and let who waits go on. Called once."""
        self.result = result
        self.error = error
        self.finished = True
        self.waiting.release()

    def wait(self) -> Any:
        """Wait for the end and return the result.

        Raises:
            HorovodInternalError: The collective failed.
        """
        with self.waiting:
            pass
        if self.error is not None:
            raise HorovodInternalError(self.error)
        if self.ready is not None:
            self._use_on_this_stream()
        return self.result

    def _use_on_this_stream(self) -> None:
        """Order this thread's stream after the collective; the host does not wait."""
        stream = accelerator.current_stream(self.tensors[0].device)
        stream.wait_event(self.ready)
        if self.in_place and stream == self.stream:
            return  # whose memory it is, and which now comes after the collective
        results = self.result if isinstance(self.result, (list, tuple)) else [self.result]
        for tensor in results:
            if isinstance(tensor, torch.Tensor) and not tensor.is_cpu:
                tensor.record_stream(stream)

    def describe(self) -> Description:
        """What the other workers need to know to compare this request with theirs, or to take part with zeros."""
        return {
            "name": self.name,
            "kind": self.kind,
            "grouped": self.grouped,
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in self.tensors],
            "devices": ["CPU" if tensor.device.type == "cpu" else "GPU" for tensor in self.tensors],
            "shapes": [list(tensor.shape) for tensor in self.tensors],
            "terms": self.terms,
        }

    @classmethod
    def of_zeros(cls, description: Description, device: torch.device) -> Self:
        """The request of a worker that has joined: zeros for what the others reduce.

        Raises:
            ValueError: They reduce tensors on GPUs, and this worker has none.
        """
        if "GPU" in description["devices"] and device.type == "cpu":
            raise ValueError(
                "the other workers reduce tensors on GPUs, but this one, which has joined, has none: let it see a GPU"
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
    """The class of the request that a worker describes."""
    return Collective._kinds[description["kind"]]
