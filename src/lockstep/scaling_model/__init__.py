"""The model of scaling: what adding workers costs, fitted to measured points, and what it says of larger counts.

`series_of` makes series out of the records of `lockstep study scaling`, `fit` fits the model to one of them.
docs/howto/studies.md has the formula.
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
