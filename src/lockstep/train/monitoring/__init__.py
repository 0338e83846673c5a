"""What a run says of itself.

`io_counters` and `io_sampling` record reading and writing over time, `data_wait` says what to do about waiting for
data, and `loader_tuning` measures how many loader processes pay. `step_clock` is where studies measure a step,
`device_clock` the clock of devices, and `environment` what a run ran on.
"""
