"""The strategy dp, as far as a machine without GPUs shows it: the threads' autocast."""

from __future__ import annotations

from threading import Thread

import torch
from torch import nn

from lockstep.train.strategies.base import CallersAutocast, DataParallelStrategy


def test_another_thread_autocasts_as_the_caller_did() -> None:
    module = CallersAutocast(nn.Linear(2, 2), "cpu")
    dtypes = []

    def call() -> None:
        dtypes.append(module(torch.ones(1, 2)).dtype)

    for dtype in (torch.bfloat16, torch.float16, None):
        with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            module.follow()
        thread = Thread(target=call)
        thread.start()
        thread.join()
    assert dtypes == [torch.bfloat16, torch.float16, torch.float32]


def test_on_a_cpu_dp_is_the_plain_module() -> None:
    net = nn.Linear(2, 2)
    assert DataParallelStrategy().wrap(net) is net
