"""Training: `fit` for Python, `run` for the command line.

`setup` builds a `job` from its `job_parts`, `loop` trains it, `evaluation` evaluates, `run_records` records and
`saving` saves; `rewind` restores an earlier state after NaN. `inference` and `export` use trained models. Packages:
`strategies`, `precision` and `optim` implement training; `custom` wraps the user-defined parts of `fit`; `guards`,
`stopping` and `monitoring` check and measure a run; `checkpoints` and `trackers` store its results.
"""

from lockstep.train.custom.callbacks import Callback, TrainingState
from lockstep.train.custom.early_stopping import EarlyStopping
from lockstep.train.fit import fit
from lockstep.train.loop import Result
from lockstep.train.monitoring.history import History
from lockstep.train.run import run

__all__ = ["Callback", "EarlyStopping", "History", "Result", "TrainingState", "fit", "run"]
