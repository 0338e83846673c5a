"""Execute a job's plan, in the process of the command that the user typed.

Start with `job_run`, which runs one generation of the workers: `job_start` starts them, and `job_signals` handles the
launcher's signals. `job_series` runs several jobs in turn without restarts. `remote_node` is the client of a host's
node process, which it keeps between generations. `job_outcome` finds the first failure, `start_errors` explains why a
host failed to start, `hang_watch` explains a job that hangs, and `stack_server` answers `lockstep stacks`. `manual_job`
runs a job whose nodes are started manually: the first one launches it, with `manual_nodes`, and each other one is a
`relay`. `restarts` continues a job after failures, generation by generation, on the hosts that `discovery` finds.
`run_function` implements horovod.run and lockstep.launch.run.
"""
