"""Correctness on a GPU, each check against a reference computed another way; all run on a CPU too, where they can."""
