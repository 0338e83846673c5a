"""Answers whether the workers of any program train one model on different data, for `lockstep check`.

- `recorder`: what each optimizer step of a worker did. `passes`: which samples its loaders delivered.
- `hooks`: attaches these to torch.
- `fingerprints`: what is recorded of tensors, samples, data sets and lines of a script.
- `answers`: a question, its answer, and the change that the answer asks for.
- `replicas`: the questions about weights, gradients and optimizer settings. `samples`: those about data and evaluation.

Workers send each record to the launcher as a line of JSON, and the launcher compares the workers' records after the
job. Nothing is compared while the program runs, so it makes no additional collective and never waits for a worker.
"""
