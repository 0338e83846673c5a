"""Save a job's state, find it again, and resume from it.

Start with `checkpoint_folder`, the checkpoints of a run. `checkpoint_format` reads and writes one checkpoint,
`snapshot` is the state in it, and `metadata` describes the model. `background_writer` writes during training;
`memory_snapshots` keeps copies in memory for restarted workers. `run_lock` locks the run folder against other jobs.
`resume` restores a run; `legacy_format` and `legacy_resume` do so for files of older scripts.
"""
