"""Horovod with one worker, for the tests of a folder that need it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lockstep.hvd.basics import init, shutdown


@pytest.fixture
def one_worker() -> Iterator[None]:
    init()
    yield
    shutdown()
