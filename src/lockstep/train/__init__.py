"""Training: `fit` for Python, `run` for the command line.

`setup` builds a `job`, `loop` trains it, `metrics` evaluates and `run_records` records. `session` has what every run
needs, also that of an `own_loop`: its records, checkpoints and stops, in the `run_folder` and to `trackers`. `kept_run`
has what a process keeps of it when another worker is lost.
`inference` and `export` use trained models. `custom` wraps the user-defined parts of `fit`. `precision` and the
packages `strategies` and `optim` implement training; `guards` stops a run, `monitoring` measures it, and `checkpoints`
stores its state.
"""

from lockstep.train.callbacks import Callback, EarlyStopping, TrainingState
from lockstep.train.fit import fit
from lockstep.train.loop import Result
from lockstep.train.monitoring.history import History
from lockstep.train.run import run

__all__ = ["Callback", "EarlyStopping", "History", "Result", "TrainingState", "fit", "run"]
