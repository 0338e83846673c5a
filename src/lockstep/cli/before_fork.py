"""Import the modules that the workers of Lockstep's own commands need, once, before the workers are forked."""

from __future__ import annotations

import io
import sys
from contextlib import redirect_stderr, redirect_stdout, suppress

import lockstep.cli.train
import lockstep.train.inference
import lockstep.train.run
from lockstep.cli.parse import TrainCommand, parse_train
from lockstep.config.legacy_flags import translate
from lockstep.errors import LockstepError

with suppress(ImportError):  # where it is missing, --track tensorboard says so
    import torch.utils.tensorboard  # noqa: F401

# Fills the cache of `parse_train` for the workers. Errors are ignored here, because the workers report them.
if sys.argv[1:2] == ["train"]:
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()), suppress(SystemExit, LockstepError):
        if parse_train(translate(sys.argv[2:], TrainCommand).arguments).job.model.compile:
            import lockstep.models.compiler  # noqa: F401
