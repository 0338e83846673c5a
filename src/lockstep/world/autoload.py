"""The entry point that `import torch` calls in every program: nearly free outside jobs that Lockstep has launched."""

from __future__ import annotations

import os
import sys

from lockstep.diagnosis import FOLDER, MEASURE, OBSERVE


def attach() -> None:
    """Publish the progress of this program, and observe its steps, if it is a worker of a job that asks for it."""
    try:
        if os.environ.get(FOLDER):
            from lockstep.diagnosis import publisher

            publisher.attach_to_torch()
        if os.environ.get(OBSERVE) or os.environ.get(MEASURE):
            from lockstep.world import observer

            observer.attach_to_torch()
    except Exception as error:  # which would make `import torch` fail
        print(f"lockstep: this worker publishes no progress: {error!r}", file=sys.stderr)
