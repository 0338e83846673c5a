"""Whether the workers of any program train one model on different data: `lockstep check`, and a comparison always on.

- `recorder`: what each optimizer step of a worker did. `passes`: which samples its loaders delivered.
- `hooks`: attaches these to torch. `fingerprints`: of tensors, samples, data sets and lines of a script; `parameters`:
  what an optimizer trains.
- `answers`: a question, its answer, and the fix. `replicas`: the questions about weights, gradients and settings.
  `samples`: those about data and evaluation.
- `state_recorder`, `state_comparison`: what every observed worker publishes now and then, and what is certainly wrong.

Workers send what they record to the launcher, which compares it: no additional collective, and no wait.
"""
