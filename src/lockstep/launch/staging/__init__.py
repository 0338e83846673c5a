"""`--stage`: copies of shared files on each host's own disk, for one job.

`stage_options` are the flags, and how commands and variables name the copies. `job_copies` is the launcher's side,
`stager` the process on each host, which removes the copies when the job ends. `tar_stream` packs the sources into one
stream, which every host unpacks and passes on.
"""
