"""Carries a job's plan out, from where the user typed the command.

Start with `job`: one start of the workers, to the last process's end. `remote_node` is a host's node process as seen
from here, `node_pool` keeps them from one start to the next; `failure` finds out which failure came first, and
`start_errors` why a host could not take part. `restarts` starts a job's workers anew, on the hosts that `membership`
and `discovery` know of. `elastic_driver` drives Horovod's elastic jobs, whose workers are replaced alone;
`local_elastic` is one of this machine's processes. `run_function` is horovod.run and lockstep.launch.run, `signals`
stops a launcher.
"""
