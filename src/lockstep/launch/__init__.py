"""The launcher: start a job's workers on one or more hosts, and end them.

`command_workers` starts workers for Lockstep's commands, `notebook` for functions; `output` shows what they print.
`machine_doctor` and `hosts_doctor` are the checks of `lockstep doctor`.

| package | purpose |
|---|---|
| `plan` | derives, without side effects, the commands that `--dry-run` prints from options and environment |
| `controller` | executes a plan, in the process of the user's command |
| `node` | runs on each host beside the workers: starts, watches and ends them |
| `forking` | forks workers from one process that has imported torch |
| `protocol` | messages between the controller and the nodes |
"""

from lockstep.launch.notebook import run

__all__ = ["run"]
