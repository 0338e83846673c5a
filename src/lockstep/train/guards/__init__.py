"""What stops a faulty run.

`checks` compares the workers' jobs and the model with its data before the first step; `nonfinite` detects NaN or
infinite gradients before the update.
"""
