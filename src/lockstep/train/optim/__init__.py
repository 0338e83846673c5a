"""Optimizers, learning rates and batch sizes.

Start with `build`, which also freezes parameters. `layerwise` has the optimizers LARS and LAMB, `schedule` computes the
learning rate of each step, `ema` the moving average of the weights, and `batch_plan` the global batch size.
"""
