"""What `lockstep doctor` examines: this `machine`, or all `hosts` of a job, by a `probe_worker` on each."""
