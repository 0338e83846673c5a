"""Optimizers, learning rates and batch sizes.

Start with `build`, which also freezes parameters. `lars` and `lamb` (based on `layerwise`) are optimizers, `schedule`
computes the learning rate of each step, `ema` the moving average of the weights, `batch_plan` the global batch size.
"""
