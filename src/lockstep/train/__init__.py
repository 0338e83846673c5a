"""Training: `fit` for Python, `run` for the command line.

`setup` builds a `job` of `inputs` and a `network`, `begin` restores its state, `loop` trains it, `metrics` evaluates
and `run_records` records; `lockstep.run` has what every run needs. `inference` and `export` use trained models.
`custom` wraps the user-defined parts of `fit`. `precision` and the packages `strategies` and `optim` implement
training, `guards` stops a faulty run, `worker_times` times the workers, and `history` has the results of epochs.
"""

from lockstep.train.callbacks import Callback, EarlyStopping, TrainingState
from lockstep.train.fit import fit
from lockstep.train.history import History
from lockstep.train.loop import Result
from lockstep.train.run import run

__all__ = ["Callback", "EarlyStopping", "History", "Result", "TrainingState", "fit", "run"]
