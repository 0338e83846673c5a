"""Stopping after a step, with a checkpoint.

`stop_requests` sees to signals to any worker, `deadline` to time limits that come near.
"""
