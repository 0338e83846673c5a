"""Stopping after a step, with a checkpoint: on a signal to a worker (`requests`) or near a time limit (`deadline`)."""
