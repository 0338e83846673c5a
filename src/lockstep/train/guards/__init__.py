"""What stops a run that has gone wrong; `base` is a guard that looks at nothing, and what guards see of a job.

`job_consistency` compares the workers' jobs before the first step, `replica_check` their weights while they train;
`nonfinite` finds gradients that are infinite or NaN before the update (`nonfinite_trace` finds their layer), and
`finite_weights` asks before weights are saved.
"""
