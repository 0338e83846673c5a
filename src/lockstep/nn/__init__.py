"""Neural network code that several packages use. It imports only `errors`.

- `global_batch_norm`: batch norm over all workers, for `hvd` and `train`.
- `optimizer_state`: loads an optimizer's state as it was saved, for `hvd` and `train`.
- `replicas`: fingerprints of tensors, and the message about replicas that differ, for `hvd` and `train`.
- `trial_forward`: checks with blank images that a model accepts images of a given size and number.
"""
