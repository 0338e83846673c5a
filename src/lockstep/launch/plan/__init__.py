"""From options and environment to a job's plan. Pure: nothing starts here.

Start with `job_plan`; `options` (and `restart_options`) are the flags, `hosts` and `allocation` where the job may run,
`transports` how a host's part is started, `timings` how long its parts wait for each other. `dry_run` prints a plan,
`batch_job` and `batch_script` write it for Slurm, PBS and LSF; `horovodrun_plan` and `horovodrun_flags` translate
Horovod's command line, `elastic_rules` says how its workers come and go. Nothing here acts.
"""
