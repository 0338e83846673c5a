"""Who this worker is, and how it meets its peers.

Start with `world`: a worker's rank, size, device and process group. `launcher_environment` reads the place that a
launcher has given it, `rank0_address`, `interfaces`, `rendezvous` and `store` bring it to the others
(`elastic_rendezvous` where their number changes), `slurm_hostlist` reads Slurm's lists of hosts, `batch_time_left`
how long the batch job may still run, and `job_series` which jobs follow which. `devices` chooses among what
`accelerator` finds, the only module that knows kinds of devices. `lifeline` notices within milliseconds that a worker
has ended, and `peer_loss` what follows for one whose GPU waits for it. Imports config, files and errors, and torch only
when a function needs it.
"""
