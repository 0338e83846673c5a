"""Read the records of runs and studies, written by Lockstep or for TensorBoard.

`sources` finds them in the paths that the user passes. `lockstep_runs` and `tensorboard` read runs into `run.Run` with
its `curve.Curve`s; `studies` reads study records; `run_labels` gives runs distinct names for legends.
"""
