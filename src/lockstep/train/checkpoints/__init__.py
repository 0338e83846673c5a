"""Save a job's state, find it again, and resume from it.

Start with `checkpoint_folder`, the checkpoints of a run, written during training. `checkpoint_format` reads and writes
one checkpoint, and `snapshot` is the state in it. `memory_snapshots` keeps copies in memory for restarted workers.
`resume` restores a run, also from the files of older scripts, which `legacy_format` interprets.
"""
