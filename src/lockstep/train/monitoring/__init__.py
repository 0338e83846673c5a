"""Measurements of a run.

`data_wait` chooses the number of loader processes, and gives advice when training
waits for data. `worker_times` times the training between reports, and compares the phases of the workers'
steps. `history` collects the results of epochs.
"""
