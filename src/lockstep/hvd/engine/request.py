"""One collective that a worker asks for: its description, by which workers compare it, and its future result."""

from __future__ import annotations

import threading
import time
from hashlib import blake2b
from itertools import combinations
from typing import Any

import torch

from lockstep.hvd.engine.reduction import OPERATION_NAMES, SUM
from lockstep.hvd.exceptions import HorovodInternalError
from lockstep.world import accelerator

Description = dict[str, Any]  # plain JSON: what one worker says of its request

_digests: dict[Any, bytes] = {}


def _digest(key: Any) -> bytes:
    """8 bytes that stand for a key; remembered, since a training step asks for the same ones again and again."""
    digest = _digests.get(key)
    if digest is None:
        if len(_digests) > 100_000:  # names that count up for ever
            _digests.clear()
        digest = _digests[key] = blake2b(repr(key).encode(), digest_size=8).digest()
    return digest


class Request:
    """A named collective of this worker, submitted to a channel.

    Args:
        kind: allreduce, allgather, broadcast, alltoall, reducescatter, barrier or agreement.
        name: The name under which the workers match it, without the kind.
        tensors: What it works on.
        grouped: Whether the result is a list, of as many tensors as there are.
        in_place: Whether the results go into `tensors`.
        operation: How allreduce and reducescatter reduce, AVERAGE to PRODUCT.
        root: The broadcasting worker's global rank.
        splits: Rows that alltoall sends to each worker.
        note: What the workers must agree on in an "agreement".
        urgent: Whether somebody waits for it, so that it must not be held back for others to join it.
    """

    __slots__ = (
        "channel",
        "entry",
        "error",
        "finished",
        "grouped",
        "in_place",
        "key",
        "kind",
        "name",
        "note",
        "operation",
        "postscale",
        "prescale",
        "ready",
        "result",
        "root",
        "size_bytes",
        "splits",
        "stream",
        "submitted",
        "tensors",
        "urgent",
        "waiting",
        "written",
    )

    def __init__(
        self,
        kind: str,
        name: str,
        tensors: list[torch.Tensor],
        *,
        grouped: bool = False,
        in_place: bool = False,
        operation: int = SUM,
        prescale: float = 1.0,
        postscale: float = 1.0,
        root: int = 0,
        splits: list[int] | None = None,
        note: str = "",
        urgent: bool = False,
    ) -> None:
        self.kind = kind
        self.name = f"{kind}.{name}"
        self.tensors = tensors
        self.grouped = grouped
        self.in_place = in_place
        # Plain numbers: 2, 2.0 and numpy's 2.0 must look alike to the other workers.
        self.operation = operation = int(operation)
        self.prescale = prescale = float(prescale)
        self.postscale = postscale = float(postscale)
        self.root = root = int(root)
        self.splits = splits
        self.note = note
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
        # Workers may differ in rows, the first dimension, of these two.
        any_rows = kind in ("allgather", "alltoall")
        signature = (
            kind,
            tuple([(t.dtype, t.is_cpu, t.dim(), t.shape[1:] if any_rows else t.shape) for t in tensors]),
            operation,
            prescale,
            postscale,
            root,
            note,
            grouped,  # since a group is never fused with others
        )
        self.key = _digest(self.name)
        self.entry = self.key + _digest(signature)

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
            _use_on_this_stream(self)
        return self.result

    def describe(self) -> Description:
        """What the other workers need to know to compare this request with theirs, or to take part with zeros."""
        return {
            "name": self.name,
            "kind": self.kind,
            "grouped": self.grouped,
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in self.tensors],
            "devices": ["CPU" if tensor.device.type == "cpu" else "GPU" for tensor in self.tensors],
            "shapes": [list(tensor.shape) for tensor in self.tensors],
            "operation": self.operation,
            "prescale": self.prescale,
            "postscale": self.postscale,
            "root": self.root,
            "note": self.note,
        }


def _use_on_this_stream(request: Request) -> None:
    """Order this thread's stream after the collective; the host does not wait."""
    stream = accelerator.current_stream(request.tensors[0].device)
    stream.wait_event(request.ready)
    if request.in_place and stream == request.stream:
        return  # whose memory it is, and which now comes after the collective
    results = request.result if isinstance(request.result, (list, tuple)) else [request.result]
    for tensor in results:
        if isinstance(tensor, torch.Tensor) and not tensor.is_cpu:
            tensor.record_stream(stream)


def ghost(description: Description, device: torch.device) -> Request:
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
    request = Request(
        description["kind"],
        description["name"].partition(".")[2],
        tensors,
        grouped=description["grouped"],
        operation=description["operation"],
        prescale=description["prescale"],
        postscale=description["postscale"],
    )
    if any(not tensor.is_cpu for tensor in tensors):
        request.follow_stream()
    return request


def explain_mismatch(descriptions: dict[int, Description]) -> str:
    """Say what the workers, by rank, do not agree on."""
    for (rank, one), (other_rank, other) in combinations(descriptions.items(), 2):
        if text := _difference(one, other):
            return f"{text} (tensor {one['name']!r}, ranks {rank} and {other_rank})"
    return f"Mismatched requests for {next(iter(descriptions.values()))['name']!r}."


def _difference(one: Description, other: Description) -> str:
    kind = one["kind"].upper()
    if one["grouped"] != other["grouped"]:
        return f"Mismatched {kind} groups: One rank sent a group of tensors, but another rank sent a single tensor."
    if len(one["shapes"]) != len(other["shapes"]):
        return (
            f"Mismatched {kind} group sizes: One rank sent {len(one['shapes'])} tensors, but another rank sent "
            f"{len(other['shapes'])} tensors."
        )
    for mine, theirs in zip(one["dtypes"], other["dtypes"], strict=True):
        if mine != theirs:
            return f"Mismatched data types: One rank had type {mine}, but another rank had type {theirs}."
    for mine, theirs in zip(one["devices"], other["devices"], strict=True):
        if mine != theirs:
            return (
                f"Mismatched {kind} CPU/GPU device selection: One rank specified device {mine}, but another rank "
                f"specified device {theirs}."
            )
    if one["operation"] != other["operation"]:
        mine, theirs = OPERATION_NAMES[one["operation"]], OPERATION_NAMES[other["operation"]]
        return f"Mismatched reduction operation: One rank said {mine}, but another rank said {theirs}."
    if text := _difference_of_shapes(one, other):
        return text
    scales = [(said["prescale"], said["postscale"]) for said in (one, other)]
    if scales[0] != scales[1]:
        return (
            f"Mismatched prescale and/or postscale factors: One rank sent factors {scales[0]}, but another rank "
            f"sent factors {scales[1]}."
        )
    if one["root"] != other["root"]:
        return (
            f"Mismatched {kind} root ranks: One rank specified root rank {one['root']}, but another rank specified "
            f"root rank {other['root']}."
        )
    if one["note"] != other["note"]:
        return f"Mismatched {one['name'].partition('.')[2]}: One rank said {one['note']}, another {other['note']}."
    return ""


def _difference_of_shapes(one: Description, other: Description) -> str:
    kind = one["kind"].upper()
    first = 1 if one["kind"] in ("allgather", "alltoall") else 0
    for mine, theirs in zip(one["shapes"], other["shapes"], strict=True):
        if len(mine) != len(theirs):
            return (
                f"Mismatched {kind} tensor shapes: One rank sent a tensor of rank {len(mine)}, but another rank sent "
                f"a tensor of rank {len(theirs)}: shapes {mine} and {theirs}."
            )
        if mine[first:] != theirs[first:]:
            return (
                f"Mismatched {kind} tensor shapes: One rank sent a tensor of shape {mine}, but another rank sent a "
                f"tensor of shape {theirs}."
            )
    return ""
