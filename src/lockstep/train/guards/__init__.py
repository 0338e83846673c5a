"""What stops a run: `checks` and `nonfinite` a faulty one, `stopping` any one on request or before a time limit.

`checks` compares the workers' jobs and the model with its data before the first step, and the replicas during training;
`nonfinite` detects NaN or infinite gradients before the update. `start_check` runs the checks for --dry-run.
"""
