"""The collectives, one file each: a subclass of `Collective`, and the functions that users call.

- `submission`: checks the arguments of a call and submits the request to the engine.
- `reducing`: the base class of all-reduce and reduce-scatter; `adasum`: the Adasum operation.
- `functions`: broadcasts parameters, optimizer states and objects. `sparse`: reduces sparse gradients.
- `join`: lets a worker without data take part in the others' all-reduces.
"""
