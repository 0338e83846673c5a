"""The GPU suite: is Lockstep right on a GPU, and how fast is it there?

    benchmarks/gpu/stage --cifar10 FILE.zip       # with a network: gpu-stage/, 45 MB; FILE.zip: train/CLASS, test/CLASS
    python benchmarks/gpu check+mnist gpu-stage/data --minutes 8             # on the GPU
    python benchmarks/gpu speed --minutes 8                                  # on the GPU
    python benchmarks/gpu cifar10 gpu-stage/data --minutes 9.4               # on the GPU

Parts: `check` (correctness) and `speed` need no data, `mnist` and `cifar10` a folder; `all` does check, speed and what
data there is; `jpeg` measures a folder of photographs. A part keeps its minutes: what does not fit is left out, and
said. Each step is a process of its own, so that one which fails does not stop the others; the exit code is 1 if a
correctness check failed. Results are printed and appended to benchmarks/records/gpu_*.jsonl, or with --out DIR to
DIR/records.

It needs torch, torchvision and numpy; what else Lockstep needs is taken from gpu-stage/site or, without it, from the
image. With --device cpu the suite itself is tried, at sizes that say nothing about speed.
"""
