"""What workers of Lockstep's own commands need, imported and done once in the process that they are forked from."""

from __future__ import annotations

import io
import sys
from contextlib import redirect_stderr, redirect_stdout, suppress

import torch.utils.tensorboard  # noqa: F401

import lockstep.cli.train
import lockstep.study.step_worker
import lockstep.train.inference
import lockstep.train.run  # noqa: F401
from lockstep.cli.parse import TrainCommand, parse_train
from lockstep.config.legacy_flags import translate
from lockstep.errors import LockstepError

# Their own command line, which `parse_train` remembers. If it is wrong, the workers say so.
if sys.argv[1:2] == ["train"]:
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()), suppress(SystemExit, LockstepError):
        parse_train(translate(sys.argv[2:], TrainCommand).arguments)
