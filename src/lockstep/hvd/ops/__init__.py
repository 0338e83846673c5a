"""The collectives, one file each: a subclass of `Collective`, and the functions that users call.

- `submission`: checks the arguments of a call and submits the request to the engine.
- `allreduce`: all-reduces, Adasum, and the base class that they share with `reducescatter`.
- `functions`: broadcasts parameters, optimizer states and objects.
- `join`: lets a worker without data take part in the others' all-reduces.
"""
