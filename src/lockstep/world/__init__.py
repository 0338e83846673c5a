"""This worker's rank, device and process group, and the rendezvous with its peers.

Start with `world`. `launcher_environment` reads the rank info that a launcher set; `rank0_address`, `interfaces`,
`rendezvous` and `store` connect the workers (`elastic_rendezvous` if their number changes). `slurm_hostlist` parses
Slurm's host lists, `batch_time_left` finds the remaining time of the batch job, and `job_series` identifies restarts
and requeues of a job. `devices` chooses among the devices that `accelerator` finds, which hides the differences between
kinds of devices; `step_clock` times the phases of steps on them, and `host_memory` keeps freed memory for a CPU's next
step. `lifeline` detects within milliseconds that a worker died, and `peer_loss` ends a worker whose GPU waits for the
dead one. Imports diagnosis, config, files and errors, and torch only when a function needs it.
"""
