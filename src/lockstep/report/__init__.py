"""Reports (figures, tables and an HTML page) from run and study records, and a live view, `watch`. Without torch.

`sources` finds the records in the paths that the user passes, and reads run folders into `run.Run`; `worker_records`
has each worker's part of them. `sides` reads the two jobs of a `comparison`. `read_steps` reads a
`measured_step`; `step_verdict` says what bounds it, and `step_changes` what would shorten it.
"""
