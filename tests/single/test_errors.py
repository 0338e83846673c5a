"""How errors of libraries are shortened, and untrusted text in errors is shown."""

from __future__ import annotations

import pytest

from lockstep.errors import CheckpointError, first_line

SEGMENT = "Error while creating shared memory segment /dev/shm/nccl-Tq3QYb (size 33030528), error: No space left (28)"
FIX = "enlarge /dev/shm (docker run --shm-size=2g), or set NCCL_SHM_DISABLE=1"
OLD = "NCCL error in: a.cpp:94, unhandled system error, NCCL version 2.28.9"  # torch 2.8 to 2.14
NEW = "NCCL Init failed: unhandled cuda error"  # torch 2.15
NVLS = "Failed to bind NVLink SHARP (NVLS) Multicast memory : CUDA error 401 'the operation cannot be performed'"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "RuntimeError"),
        ("one\ntwo", "one"),
        ("x" * 301, "x" * 300 + "..."),
        (f"{OLD}\nncclSystemError: System call failed. \nLast error:\n{SEGMENT}", f"{OLD}: {SEGMENT}; {FIX}"),
        (f"{OLD}\nncclUnhandledCudaError: Call failed.\nLast error:\n{NVLS}\nException raised", f"{OLD}: {NVLS}"),
        (f"{NEW} \nNCCL Last Error: {SEGMENT}", f"{NEW}: {SEGMENT}; {FIX}"),
        (f"{NEW} \nNCCL Last Error: {'y' * 301}", f"{NEW}: {'y' * 300}..."),
        (f"{OLD}\nncclInternalError: Check failed.\nLast error:\n\nException raised from", OLD),
        (f"{OLD}\nncclInvalidUsage: Wrong.\nLast error: Unknown NCCL Error\n", OLD),
        (f"in one line. NCCL Last Error: {SEGMENT}", f"in one line. NCCL Last Error: {SEGMENT}; {FIX}"),
    ],
)
def test_error_keeps_the_reason_that_nccl_gives(text: str, expected: str) -> None:
    assert first_line(RuntimeError(text)) == expected


def test_error_shows_no_control_characters() -> None:
    assert str(CheckpointError("seed \x1b[2J\u202e, not 3")) == r"seed \x1b[2J\u202e, not 3"
