"""Fingerprints of tensors, samples and data sets, and the line of the user's script that led to a call.

Equal fingerprints mean equal bits, but for collisions and, in large tensors, elements that cancel out. Nothing here
draws random numbers, and nothing changes a tensor.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import random
import sys
import sysconfig
from collections.abc import Mapping
from functools import cache
from itertools import islice
from types import FrameType
from typing import TYPE_CHECKING, Any
from zlib import crc32

from lockstep.diagnosis import replicas
from lockstep.diagnosis.loaded_samples import tensors

if TYPE_CHECKING:
    import torch

WHOLE = 1 << 16  # bytes of a tensor or sample that are all hashed; of a larger one so many, and a sum of all
MANY_ITEMS = 8  # of a list or tensor that has data, not settings
MAX_PATH = 4096  # characters; a longer text is data
MAX_ITEMS = 64  # of a list in a data set, of which this many are hashed
MAX_DEPTH = 4  # of objects within a data set
CLASSES = ("classes", "class_names", "categories")  # attributes with names in the order of their numbers
SIGNS = 1 << 14  # elements of a gradient that are projected
MAX_NODES = 20_000  # of a loss's graph
UNKNOWN = ""  # stands for the graph of a loss that was not seen


def digest(*parts: bytes | str | int) -> str:
    """Return a hash of 12 hexadecimal digits."""
    made = hashlib.blake2b(digest_size=6)
    for part in parts:
        made.update(part if isinstance(part, bytes) else str(part).encode())
        made.update(b"\0")
    return made.hexdigest()


def of_tensor(tensor: torch.Tensor) -> str:
    """Return the fingerprint of a tensor's bits, of any dtype, shape and device."""
    import torch

    own = _dense(tensor)
    bits = own.contiguous().reshape(-1).view(torch.uint8)
    step = len(bits) // WHOLE | 1  # odd: not always the same byte of an element
    return digest(str(own.dtype), int(replicas.fingerprints([own])[0]), bits[::step].cpu().numpy().tobytes())


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    own = tensor.detach()
    return own.to_dense() if own.is_sparse else own


def of_samples(batch: Any, count: int | None = None) -> list[str]:
    """Return a fingerprint of each sample in a batch, from all tensors that have as many rows as the first."""
    import torch

    found = [tensor.detach() for tensor in tensors(batch) if tensor.dim()]
    if not found:
        return []
    count = len(found[0]) if count is None else count
    rows: list[list[bytes]] = [[] for _ in range(count)]
    for tensor in found:
        if len(tensor) != count or not tensor.numel():
            continue
        flat = tensor.contiguous().reshape(count, -1).cpu()
        bits = flat.view(torch.uint8)
        bits = bits[:, :: max(1, bits.shape[1] // WHOLE) | 1]
        for row, content in zip(rows, bits.numpy(), strict=True):
            row.append(content.tobytes())
    return [digest(*row) for row in rows]


def of_data(data: Any, in_order: bool = True) -> str:
    """Return the fingerprint of a data set: its types, lengths, and a part of each attribute; "" if it shows no data.

    Data sets of two workers with equal, non-empty fingerprints have the same samples in the same order. Tensors, lists
    of many items and paths of files are data; a data set of settings only may draw random samples. Without `in_order`,
    the order of the items, and which of them a `Subset` chooses, make no difference.
    """
    parts: list[str] = []
    shows_data = False

    def add(*content: bytes | str | int, is_data: bool = False) -> None:
        nonlocal shows_data
        parts.append(digest(*content))
        shows_data |= is_data

    def visit(item: Any, depth: int) -> None:
        import torch

        if not in_order and (total := _sum_of_items(item)):
            add(total, is_data=True)
        elif isinstance(item, torch.Tensor):
            add(of_tensor(item), is_data=item.numel() >= MANY_ITEMS)
        elif isinstance(item, (str, bytes, int, float, bool)):
            add(str(item), is_data=isinstance(item, str) and (len(item) > MAX_PATH or os.path.exists(item)))
        elif hasattr(item, "_fingerprint") and isinstance(item._fingerprint, str):  # of Hugging Face's data sets
            add(item._fingerprint, is_data=True)
        elif hasattr(item, "tobytes") and hasattr(item, "shape"):  # an array of NumPy
            flat = item.reshape(-1)
            add(str(item.shape), flat[:WHOLE].tobytes(), flat[-WHOLE:].tobytes(), is_data=flat.size >= MANY_ITEMS)
        elif depth >= MAX_DEPTH:
            return
        elif isinstance(item, (list, tuple, range)):
            add(len(item), is_data=len(item) >= MANY_ITEMS)
            stride = max(1, len(item) // MAX_ITEMS)
            for value in islice(item, 0, None, stride):
                visit(value, depth + 1)
        elif isinstance(item, Mapping):
            for name, value in islice(item.items(), MAX_ITEMS):
                add(str(name))
                visit(value, depth + 1)
        elif isinstance(item, torch.utils.data.Subset) and not in_order:
            add("Subset", len(item.indices))
            visit(item.dataset, depth + 1)
        elif hasattr(item, "__dict__") and not callable(item):
            parts.append(type(item).__qualname__)
            visit(vars(item), depth + 1)

    visit(data, 0)
    return digest(*parts) if shows_data else ""


def of_classes(data: Any, depth: int = 0) -> dict[str, list[str]]:
    """Return the fingerprints of a data set's classes, by attribute: in any order, and in that of their numbers."""
    found: dict[str, list[str]] = {}
    for name, value in getattr(data, "__dict__", {}).items():
        names: list[Any] = []
        if isinstance(value, Mapping) and [*range(len(value))] == sorted(
            each for each in value.values() if type(each) is int
        ):
            names = sorted(value, key=value.__getitem__)
        elif isinstance(value, (list, tuple)) and name in CLASSES:
            names = list(value)
        elif depth < MAX_DEPTH and not callable(value):
            found |= of_classes(value, depth + 1)
        if names and {*map(type, names)} == {str} and len({*names}) == len(names):
            found[name] = [digest(*sorted(names)), digest(*names)]
    return found


def _sum_of_items(item: Any) -> str:
    """Return a sum over many items in any order: of a list of plain ones, or of a tensor; "" for orders and others."""
    import torch

    if isinstance(item, torch.Tensor) and item.numel() >= MANY_ITEMS and not item.is_sparse:
        is_order = item.dim() == 1 and item.dtype == torch.int64 and len(item.unique()) == len(item)
        total = int(item.detach().contiguous().reshape(-1).view(torch.uint8).sum())
        return "" if is_order else f"{tuple(item.shape)} {total}"
    if isinstance(item, list) and len(item) >= MANY_ITEMS and isinstance(item[0], (str, int, float, tuple)):
        is_order = isinstance(item[0], int) and len({*map(repr, item)}) == len(item)
        return "" if is_order else f"{len(item)} {sum(crc32(repr(each).encode()) for each in item)}"
    return ""


def project(gradients: list[torch.Tensor | None]) -> float:
    """Return the sum of the gradients' elements with fixed signs: that of a mean is the mean of those of its terms."""
    import torch

    total = 0.0
    for number, gradient in enumerate(gradients):
        if gradient is None:
            continue
        part = _dense(gradient).reshape(-1)[:SIGNS].double().cpu()
        signs = torch.arange(len(part), dtype=torch.float64).add_(number).mul_(2.399963).cos_()
        total += float(part @ signs)
    return total


def of_graph(loss: torch.Tensor | None) -> set[str]:
    """Return the pairs of operations in a loss's graph of which one uses the other's result, such as "Add of Pow".

    Factors that are constants count as nothing: they may be 1 on some workers, where they are left out.
    """
    if loss is None or loss.grad_fn is None:
        return {UNKNOWN}
    found, seen, rest = set[str](), set[Any](), [_without_factors(loss.grad_fn)]
    while rest and len(seen) < MAX_NODES:
        node = rest.pop()
        if node in seen:
            continue
        seen.add(node)
        used = [_without_factors(each) for each, _ in node.next_functions if each is not None]
        found.update(f"{_operation(node)} of {_operation(each)}" for each in used)
        rest += used
    return found


def _without_factors(node: Any) -> Any:
    while _operation(node) in ("Mul", "Div"):
        used = [each for each, _ in node.next_functions if each is not None]
        if len(used) != 1:
            break
        node = used[0]
    return node


def _operation(node: Any) -> str:
    return str(node.name()).rpartition("::")[2].partition("Backward")[0]


@cache
def _libraries() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    return (here, *(paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")))


def of_random_states() -> dict[str, str]:
    """Return the fingerprint of the state of each generator of random numbers in this process."""
    import torch

    states = {"random": digest(str(random.getstate())), "torch": of_tensor(torch.get_rng_state())}
    if "numpy" in sys.modules:
        name, words, *rest = sys.modules["numpy"].random.get_state()
        states["numpy"] = digest(name, words.tobytes(), *map(str, rest))
    if torch.accelerator.is_available():
        device: Any = torch.get_device_module()
        if device.is_initialized():
            states["device"] = of_tensor(device.get_rng_state())
    return states


def _frame_of_script() -> FrameType | None:
    """Return the innermost calling frame outside of libraries."""
    frame: FrameType | None = sys._getframe(1)
    while frame and frame.f_code.co_filename.startswith(("<", *_libraries())):
        frame = frame.f_back
    return frame


def call_of_script() -> str:
    """Return the qualified name of Lockstep's function that the script has called, at whatever depth that was."""
    frame, script, name = sys._getframe(1), _frame_of_script(), ""
    while frame and frame is not script:
        name = frame.f_code.co_qualname if frame.f_code.co_filename.startswith(_libraries()[0]) else name
        frame = frame.f_back  # type: ignore[assignment]
    return name


def line_of_script() -> str:
    """Return "file:line" of the innermost calling frame outside of libraries; "" if there is none."""
    frame = _frame_of_script()
    return f"{frame.f_code.co_filename.removeprefix(os.getcwd() + os.sep)}:{frame.f_lineno}" if frame else ""


def is_cycling() -> bool:
    """Whether the script repeats a loader without end: in a generator, or on StopIteration."""
    frame = _frame_of_script()
    in_generator = frame is not None and bool(frame.f_code.co_flags & inspect.CO_GENERATOR)
    return in_generator or isinstance(sys.exc_info()[1], StopIteration)
