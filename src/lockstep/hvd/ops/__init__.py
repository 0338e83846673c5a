"""The collectives that users call, one file each.

Each checks its arguments and asks the engine through `submission`; `functions` broadcasts parameters, optimizers and
objects, `sparse` reduces sparse gradients, and `join` lets a worker with no more data take part.
"""
