"""The collectives, one file each: a subclass of `Collective`, and the functions that users call.

- `submission`: submits requests to the engine, and waits; with `barrier` and `join`.
- `allreduce`: all-reduces, Adasum, and the base class that they share with `reducescatter`.
- `functions`: broadcasts parameters, optimizer states and objects.
"""
