"""The collectives: subclasses of `Collective`, and the functions that users call.

- `submission`: submits requests to the engine, and waits; with `barrier` and `join`.
- `allreduce`; `broadcast`; `rows`: all-gather, reduce-scatter and all-to-all.
- `functions`: broadcasts parameters, optimizer states and objects.
"""
