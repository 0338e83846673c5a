"""Series of throughput by number of workers, and the model that predicts more workers from them.

`series_of` groups the records of `lockstep study scaling` into series; `fit` fits the model to a series.
"""

from lockstep.scaling_model.fitted_model import LEVEL, Model, PointError, Prediction, fit, listed
from lockstep.scaling_model.series import MeasuredPoint, Series, machine_of, series_of

__all__ = [
    "LEVEL",
    "MeasuredPoint",
    "Model",
    "PointError",
    "Prediction",
    "Series",
    "fit",
    "listed",
    "machine_of",
    "series_of",
]
