"""Training: `fit` for Python, `run` for the command line.

`setup` puts a `job` together (of `job_parts`), `loop` trains it, `evaluation` evaluates, `run_records` records and
`saving` saves; `rewind` goes back after trouble. `inference` and `export` use what was trained. In packages: the ways
to train (`strategies`, `precision`, `optim`), what a caller of `fit` brings (`custom`), what watches over it (`guards`,
`stopping`, `monitoring`), and what is kept (`checkpoints`, `trackers`).
"""

from lockstep.train.custom.callbacks import Callback, TrainingState
from lockstep.train.custom.early_stopping import EarlyStopping
from lockstep.train.fit import fit
from lockstep.train.loop import Result
from lockstep.train.monitoring.history import History
from lockstep.train.run import run

__all__ = ["Callback", "EarlyStopping", "History", "Result", "TrainingState", "fit", "run"]
