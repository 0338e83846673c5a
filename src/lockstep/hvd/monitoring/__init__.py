"""What hvd reports about a running job: stalled requests, slow ranks, and a timeline.

- `store_watch`: the thread that runs the checks, with its own connection to the job's store.
- `stall`: the check that warns about missing ranks.
- `straggler_report`: the check that warns about slow ranks.
- `timeline`: writes the Chrome trace.
"""
