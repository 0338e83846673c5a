"""Import what torch.compile imports at its first use: 0.8 s of CPU time of each worker.

Before version 2.13, torch asks for a GPU during this import, after which a forked process could use none; version 2.8
also starts a process and a thread.
"""

import torch

if torch.__version__ >= "2.13":
    import torch._inductor.compile_fx
