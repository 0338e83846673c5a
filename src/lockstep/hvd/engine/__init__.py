"""The communication engine: the threads that agree on the order of the collectives, and run them.

- `channel`: the communication thread; start reading here. `request`: the collectives submitted to it.
- `control`: exchanges the control messages; `agreement` computes from them which requests are ready on all workers.
  `mismatch` writes the error for requests that differ, `piggyback` sends small tensors in the same messages.
- `execution`: runs the agreed requests; `fusion` plans which ones share a buffer. Both use an `exchange`, which holds
  the `transfers` (data collectives over the `connections` and `process_groups`); `reduction` is the arithmetic.
- `settings`: the HOROVOD_* variables. `context`: the objects of one job. `current`: the initialized context.
"""
