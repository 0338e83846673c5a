"""Execute a job's plan, in the process of the command that the user typed.

Start with `job`, which starts the workers once and waits until all processes have exited. `remote_node` is the client
of a host's node process, which it keeps between starts. `failure` finds the first failure, `start_errors` explains why
a host failed to start, `hang_watch` explains a job that hangs, and `stack_server` answers `lockstep stacks`.
`restarts` restarts a job's workers on the hosts that `discovery` finds. `elastic_driver` runs Horovod's elastic jobs,
which replace single workers; `local_elastic` does so with processes of this machine. `run_function` implements
horovod.run and lockstep.launch.run.
"""
