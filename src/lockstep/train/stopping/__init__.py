"""Stop after a step, with a checkpoint.

`stop_requests` handles signals to any worker, `deadline` handles time limits.
"""
