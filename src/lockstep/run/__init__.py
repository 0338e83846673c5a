"""A run: what a user's own training loop calls, and what every run needs, the trainer's, too.

A `session` is a job's part of a run, from its `position` on, which `resume` restores: it counts steps, records, saves
and stops (`stopping`). `named_states` collects what is saved, `replicas` compares the workers' weights, and `balance`
their speeds. The folder is in `records`, the state in `checkpoints`. For own loops, start with `connect`: the
connection, the model (`data_parallel`), the loaders. `open_run` opens a run, and `training_run` has the epochs and
steps: their backward passes (`accumulation`), means (`figures`) and ends (`pass_end`, `save_points`). `random_state`
seeds the generators. `lockstep.data.exact_loader` has the loader.
"""
