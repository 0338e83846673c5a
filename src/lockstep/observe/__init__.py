"""What the steps of a job's workers show: slow and differing workers, and records; `python -m lockstep.observe`.

- `job_steps`: where the steps of all workers arrive: in Lockstep's launcher, or else on rank 0.
- `tcp_links`: reads how a worker's connections to other hosts do; `link_comparison` names slow links.
- `io_sampling`: counts a worker's I/O, the trainer's, too.
- `step_counts`: counts a worker's steps, and reads what explains their speed, such as the bytes of its gradients.
- `group_observation`: takes part in a job under launchers that do not watch their workers. `step_exchange`: sends the
  steps to rank 0 there, through the job's store. `outside_changes`: applies a change to a program that is measured.

It may import `script_check`, `diagnosis`, `config`, `files` and `errors`.
"""
