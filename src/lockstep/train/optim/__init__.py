"""Optimizers, learning rates and batch sizes.

Start with `build`, which also freezes parameters. `lars`, `lamb` and `muon` are optimizers, `schedule` computes the
global batch size and the learning rate of each step, and `ema` the moving average of the weights.
"""
