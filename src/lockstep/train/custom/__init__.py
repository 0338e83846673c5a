"""User-defined parts of a run, besides the model and the data.

`parts` groups all of them. The loop calls `callbacks`, which may stop it (`early_stopping` is one). `measures` computes
metrics and the confusion matrix, `custom_loss` wraps a loss, and `custom_optimizer` and `custom_schedule` wrap torch
optimizers and schedulers.
"""
