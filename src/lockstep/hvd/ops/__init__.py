"""The collectives, one file each: a `Collective`, what distinguishes it, and the functions that users call.

The functions check their arguments and ask the engine through `submission`. `reducing` is what two of the collectives
share, `adasum` one way to reduce; `functions` broadcasts parameters, optimizers and objects, `sparse` reduces sparse
gradients, and `join` lets a worker with no more data take part.
"""
