"""DistributedOptimizer, an instance of a subclass of the user's optimizer class.

- `distributed`: the function; start reading here. It creates one of two classes.
- `gradient_optimizer`: the base class, and the class that averages gradients; `gradient_reducer` reduces them in
  `buckets` during backward, by the `reductions` that it starts.
- `adasum_optimizer`: combines the workers' steps with Adasum.
- `replica_watch`: compares the workers' weights now and then.
"""
