"""Measurements of a run.

`worker_times` times the training between reports, and compares the phases of the workers' steps. `history` collects the
results of epochs.
"""
