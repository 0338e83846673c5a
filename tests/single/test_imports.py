"""What is imported when, and how."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from lockstep.imports import collector_paused


def test_the_collector_pauses_and_does_as_before_even_after_an_error() -> None:
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


def test_training_on_images_in_memory_imports_no_decoder_and_no_tensorboard_before_its_first_figures() -> None:
    code = (
        "import sys, lockstep.train, lockstep.train.trackers.tensorboard, lockstep.data.digits\n"
        "print(*{'PIL', 'simplejpeg', 'torchvision', 'tensorboard', 'matplotlib'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.split() == []
