"""Records in: runs and studies, of Lockstep and of TensorBoard, whoever wrote them.

Start with `sources`, which finds them in the paths that a user names. `lockstep_runs` and `tensorboard` make a `run` of
what they find, with its `curve`s; `studies` reads those of studies; `run_labels` tells runs apart in legends, and
`fields` takes what is damaged for missing.
"""
