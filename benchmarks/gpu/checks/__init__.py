"""Correctness checks on a GPU, each against an independently computed reference; most also run on a CPU."""
