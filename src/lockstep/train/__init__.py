"""Training: `fit` for Python, `run` for the command line.

`setup` builds a `job` from its `job_parts`, `loop` trains it, `evaluation` evaluates, `run_records` records and
`saving` saves. `inference` and `export` use trained models. `custom` wraps the user-defined parts of `fit`. Packages:
`strategies`, `precision` and `optim` implement training; `guards` stops a run, and `monitoring` measures it;
`checkpoints` and `trackers` store its results.
"""

from lockstep.train.callbacks import Callback, TrainingState
from lockstep.train.early_stopping import EarlyStopping
from lockstep.train.fit import fit
from lockstep.train.loop import Result
from lockstep.train.monitoring.history import History
from lockstep.train.run import run

__all__ = ["Callback", "EarlyStopping", "History", "Result", "TrainingState", "fit", "run"]
