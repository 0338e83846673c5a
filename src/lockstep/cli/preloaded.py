"""What workers of Lockstep's own commands need, imported and done once in the process that they are forked from."""

from __future__ import annotations

import torch.utils.tensorboard  # noqa: F401

import lockstep.cli.step_worker
import lockstep.cli.train
import lockstep.train.inference
import lockstep.train.run  # noqa: F401
from lockstep.cli.parse import parse_train

parse_train([])  # tyro reads the flags' docstrings at the first command line, and remembers them
