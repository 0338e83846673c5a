"""The checks of `lockstep doctor`: of this `machine`, or of all `hosts` of a job with a `probe_worker` on each."""
