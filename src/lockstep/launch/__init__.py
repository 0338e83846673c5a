"""The launcher: starts a job's workers on one host or many, and ends them.

`command_workers` starts workers for Lockstep's commands, `notebook` for functions; `worker_exit` makes exit codes.

| package | what it is |
|---|---|
| `plan` | pure: from options and environment to the commands that `--dry-run` prints |
| `controller` | carries a plan out, from where the user typed the command |
| `node` | runs on each host, beside the workers: starts, watches and ends them |
| `forking` | has workers forked from one process that has imported torch |
| `protocol` | what the controller and the nodes tell each other |
| `output` | what workers print, and how it reaches the user |
"""

from lockstep.launch.notebook import run

__all__ = ["run"]
