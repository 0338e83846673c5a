"""A model of the cost of adding workers, fitted to measured points, which predicts throughput on more workers.

`series_of` groups the records of `lockstep study scaling` into series; `fit` fits the model to a series. For the
formula, see docs/howto/studies.md.
"""

from lockstep.scaling_model.fitted_model import LEVEL, LeftOutPoint, Model, Prediction, fit
from lockstep.scaling_model.series import MeasuredPoint, Series, machine_of, series_of
from lockstep.scaling_model.times import Parameter

__all__ = [
    "LEVEL",
    "LeftOutPoint",
    "MeasuredPoint",
    "Model",
    "Parameter",
    "Prediction",
    "Series",
    "fit",
    "machine_of",
    "series_of",
]
