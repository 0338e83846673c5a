"""Read the records of runs and studies.

`sources` finds them in the paths that the user passes. `lockstep_runs` reads run folders into `run.Run`, which also
gives runs distinct names for legends.
"""
