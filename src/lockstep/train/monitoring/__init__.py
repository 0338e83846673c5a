"""Measurements of a run.

`io_counters` and `io_sampling` record I/O over time, `data_wait` gives advice when training waits for data, and
`loader_tuning` chooses the number of loader processes. `step_clock` publishes and times the phases of a step,
`worker_times` compares the workers', `report_interval` times training between reports, `history` collects the results
of epochs, and `environment` describes the machine.
"""
