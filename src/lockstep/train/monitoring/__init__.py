"""Measurements of a run.

`io_sampling` records I/O over time, `data_wait` gives advice when training waits for data, and
`loader_tuning` chooses the number of loader processes. `worker_times` times the training between reports, and
compares the phases of the workers' steps. `history` collects the results of epochs, and `environment` describes
the machine.
"""
