"""What a user's own training loop calls: `lockstep.connect` and what it returns.

Start with `training_world`: the connection, the model, the loaders. `training_run` counts and records the steps, and
saves or stops between two; `named_states` collects what the user wants saved, and `random_state` seeds the generators.
`lockstep.data.exact_loader` has the loader.
"""
