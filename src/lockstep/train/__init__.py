"""Training: `fit` for Python, `run` for the command line."""

from lockstep.train.fit import fit
from lockstep.train.loop import Result
from lockstep.train.run import run

__all__ = ["Result", "fit", "run"]
