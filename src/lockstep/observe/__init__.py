"""What the steps of a job's workers show: slow workers, and records. `python -m lockstep.observe` turns it on.

- `job_steps`: where the steps of all workers arrive: in Lockstep's launcher, or else on rank 0.
- `step_exchange`: sends them to rank 0 through the job's store, under launchers that do not watch their workers.

It may import `script_check`, `diagnosis`, `config`, `files` and `errors`.
"""
