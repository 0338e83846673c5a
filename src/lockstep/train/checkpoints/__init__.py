"""Saving a job's state, finding it again, and going on from it.

Start with `checkpoint_folder`: a run's checkpoints, newest and best. `checkpoint_format` is one of them on disk,
`snapshot` the state that it holds, with `metadata`; `background_writer` writes while the job trains, and
`memory_snapshots` keeps copies in memory for workers that are started anew. `run_lock`
holds the run's folder against other jobs; `resume` decides where a run begins;
`legacy_format` and `legacy_resume` do so for older scripts' files.
"""
