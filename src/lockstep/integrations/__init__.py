"""Lockstep within other frameworks: each in a package of its own, imported where it is used.

ray        horovod.ray's executors, whose workers are actors
lightning  a strategy for Lightning's trainer
"""
