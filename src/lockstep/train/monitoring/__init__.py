"""Measurements of a run.

`io_counters` and `io_sampling` record I/O over time, `data_wait` gives advice when training waits for data, and
`loader_tuning` chooses the number of loader processes. `worker_times` compares the workers' phases of a step,
`report_interval` times training between reports, `history` collects the results of epochs, and `environment`
describes the machine.
"""
