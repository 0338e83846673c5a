"""The communication engine: the threads that agree on the order of the collectives, and run them.

- `channel`: the communication thread; start reading here. `request`: the collectives submitted to it, which are
  `pending` until one of the `rounds` finishes them.
- `agreement`: computes from the workers' messages which requests are ready on all of them, and which differ.
- `fusion`: all-reduces, small ones in a shared buffer, and their arithmetic.
- `transfers`: the control connection, and the data collectives.
- `settings`: the HOROVOD_* variables. `context`: the objects of one job.
- `stall_watch`: warns about stalled requests and slow ranks; `timeline`: writes the Chrome trace.
"""
