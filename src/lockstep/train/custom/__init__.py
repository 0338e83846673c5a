"""What a caller of `fit` may bring besides a model and data.

`parts` holds all of it. `callbacks` are called in the loop and may stop it (`early_stopping` is one), `measures` sums
metrics and counts right answers by class, `custom_loss` wraps a loss, `custom_optimizer` and `custom_schedule` take
optimizers and schedulers of torch's interface.
"""
