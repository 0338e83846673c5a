"""What the steps of a job's workers show: slow workers, and records.

- `job_steps`: where the steps of all workers arrive.

It may import `script_check`, `diagnosis`, `config`, `files` and `errors`.
"""
