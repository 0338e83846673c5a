"""The entry point that `import torch` calls in every program: nearly free outside jobs that Lockstep has launched."""

from __future__ import annotations

import os
import sys

from lockstep.diagnosis import FOLDER


def attach() -> None:
    """Publish the progress of this program if it is a worker of a job."""
    if os.environ.get(FOLDER):
        try:
            from lockstep.diagnosis.publisher import attach_to_torch

            attach_to_torch()
        except Exception as error:  # which would make `import torch` fail
            print(f"lockstep: this worker publishes no progress: {error!r}", file=sys.stderr)
