"""What a process has used, from /proc."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

from lockstep.diagnosis.proc import activity

SIZE_BYTES = 50_000


def _carry() -> None:
    """Write to a pipe and read it, which is neither storage nor in the page cache."""
    reader, writer = os.pipe()
    os.write(writer, bytes(SIZE_BYTES))
    os.read(reader, SIZE_BYTES)
    os.close(reader)
    os.close(writer)


def test_bytes_that_the_main_thread_reads_and_writes_count() -> None:
    before = activity(os.getpid(), descendants=False)
    _carry()
    assert activity(os.getpid(), descendants=False).bytes - before.bytes >= 2 * SIZE_BYTES


def test_bytes_of_pipes_in_another_thread_do_not_count() -> None:
    before = activity(os.getpid(), descendants=False)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(_carry).result()
    assert activity(os.getpid(), descendants=False).bytes - before.bytes < SIZE_BYTES
