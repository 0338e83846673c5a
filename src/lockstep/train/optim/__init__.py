"""Optimizers, their rates, and how large a step is.

Start with `build`; `lars` and `lamb` (both `layerwise`) are our own optimizers, `schedule` the learning rate of each
step, `ema` the moving average of the weights, and `batch_plan` the samples of a step and the steps of an epoch.
"""
