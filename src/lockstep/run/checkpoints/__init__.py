"""Save a job's state, and find it again.

Start with `checkpoint_folder`, the checkpoints of a run, written during training. `checkpoint_format` reads and writes
one checkpoint, and `snapshot` is the state in it; `sharded` writes one in parts. `memory_snapshots` keeps copies in
memory for restarted workers. `legacy_format` reads the files of older scripts.
"""
