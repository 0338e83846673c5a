"""A run: what a user's own training loop calls, and what every run needs, the trainer's, too.

Start with `connect`: the connection, the model (`data_parallel`), the loaders. `training_run` counts and records the
steps (`figures`, `accumulation`, `pass_end`), and saves or stops between two (`stopping`). `named_states` collects what
the user wants saved, `settings` what a resume compares, and `random_state` seeds the generators. A `session` is a job's
part of a run, from its `position` on, which `resume` restores; `kept_run` is what a process keeps if another is lost.
`replicas` compares the workers' weights, and `balance` their speeds. The folder is in `records`, the state in
`checkpoints`. `lockstep.data.exact_loader` has the loader.
"""
