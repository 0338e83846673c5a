"""Derive a job's plan from options and environment. Nothing is started here.

Start with `job_plan`. `options` and `restart_options` are the flags; `hosts` and `allocation` find the hosts,
`transports` builds the commands that start their parts, and `timings` holds all time limits. `dry_run` prints a plan,
`batch_job` and `batch_script` write it for Slurm, PBS and LSF. `horovodrun_plan` and `horovodrun_flags` translate
Horovod's command line; `elastic_rules` limits the number of its workers.
"""
