"""What is imported when, and how."""

from __future__ import annotations

import gc

import pytest

from lockstep.imports import collector_paused


def test_collector_pauses_and_is_restored_even_after_an_error() -> None:
    with pytest.raises(ZeroDivisionError), collector_paused():
        _ = 1 / gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    try:
        with collector_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
