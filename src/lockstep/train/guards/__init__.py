"""Checks that stop a faulty run; `base` has the no-op guard and the guards' view of a job.

`job_consistency` compares the workers' jobs before the first step, `replica_check` their weights during training.
`nonfinite` detects NaN or infinite gradients before the update (`nonfinite_trace` finds the layer), and
`finite_weights` checks weights before they are saved. `model_check` and `start_check` run before training.
"""
