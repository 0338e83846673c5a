"""Set the command and the variables that `ps`, `pkill -f` and psutil show for this process (Linux).

The kernel reads /proc/PID/cmdline and environ from the process's memory, and the process can set their addresses
(man 2 prctl, PR_SET_MM_MAP; the kernel needs CONFIG_CHECKPOINT_RESTORE). Otherwise only the command can be set, by
overwriting the process's original arguments: if their last byte is not NUL, the kernel shows the text up to the first
NUL (`get_mm_proctitle` in fs/proc/base.c). Such a title cannot be longer than the original arguments: start a process
that needs a long title with `PADDING` as its last argument.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

PADDING = " " * 2000
# Numbers of fields of /proc/PID/stat (man 5 proc); 3 is the first after the command's name, which may contain spaces.
CODE, STACK, DATA, HEAP, ARGUMENTS = (26, 27), 28, (45, 46), 47, (48, 49)
FIRST_AFTER_NAME = 3
PR_SET_MM, PR_SET_MM_MAP = 35, 14
_shown: list[mmap.mmap] = []  # keeps the memory that the kernel reads


class _Map(ctypes.Structure):
    """The kernel's struct prctl_mm_map."""

    _fields_ = (
        *((f"{part}_{end}", ctypes.c_uint64) for part in ("code", "data") for end in ("start", "end")),
        *((name, ctypes.c_uint64) for name in ("heap_start", "heap_end", "stack_start")),
        *((f"{part}_{end}", ctypes.c_uint64) for part in ("arguments", "variables") for end in ("start", "end")),
        ("auxiliary", ctypes.c_uint64),
        ("auxiliary_size", ctypes.c_uint32),
        ("executable", ctypes.c_uint32),
    )


def set_command(command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Show these as this process's command and environment."""
    if sys.platform != "linux":
        return
    arguments = b"".join(os.fsencode(argument) + b"\0" for argument in command)
    variables = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in environment.items())
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # the kernel shows no other kind of memory
    memory = mmap.mmap(-1, len(arguments) + len(variables), flags=private)
    memory.write(arguments + variables)
    if not _point_at(ctypes.addressof(ctypes.c_char.from_buffer(memory)), len(arguments), len(variables)):
        set_title(" ".join(command))
    _shown[:] = [memory]


def _point_at(start: int, arguments: int, variables: int) -> bool:
    """Point the kernel at the memory from `start` on; return whether that worked."""
    here = _fields()
    libc = ctypes.CDLL(None)
    libc.sbrk.restype = ctypes.c_void_p
    middle = start + arguments
    new_map = _Map(
        *(here(field) for field in (*CODE, *DATA, HEAP)),
        *(libc.sbrk(0), here(STACK), start, middle, middle, middle + variables),
        *(0, 0, 0xFFFFFFFF),  # keep the auxiliary vector and the executable
    )
    done: int = libc.prctl(PR_SET_MM, PR_SET_MM_MAP, ctypes.byref(new_map), ctypes.sizeof(new_map), 0)
    return done == 0


def set_title(text: str) -> None:
    """Show `text`, truncated to the available memory, as this process's command; do nothing if that is impossible."""
    if sys.platform != "linux":
        return
    with suppress(OSError, ValueError, IndexError):
        start, end = _argument_memory()
        size = end - start
        if start and size > 2:
            title = os.fsencode(text).replace(b"\0", b" ")[: size - 2]
            ctypes.memmove(start, title.ljust(size - 1, b"\0") + b"\x01", size)


def _argument_memory() -> tuple[int, int]:
    here = _fields()
    return here(ARGUMENTS[0]), here(ARGUMENTS[1])


def _fields() -> Callable[[int], int]:
    """Return a function from the number of a field of this process's status to its value."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return lambda number: int(fields[number - FIRST_AFTER_NAME])
