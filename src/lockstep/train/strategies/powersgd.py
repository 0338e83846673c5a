"""DistributedDataParallel with PowerSGD, by torch's communication hook.

PowerSGD sends gradients as low-rank factors, and adds the error to the next step's gradients (T. Vogels,
S. Karimireddy, M. Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization", arXiv
1905.13727, as torch's hook for DistributedDataParallel implements it).
"""

# No "from __future__ import annotations": torch checks that the annotations of a hook are types.

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from lockstep.config.schema import ParallelConfig
from lockstep.train.strategies.base import Tensors
from lockstep.train.strategies.ddp import DistributedStrategy, Future
from lockstep.world import accelerator
from lockstep.world.world import World

EARLIEST_START = 2  # torch's hook needs two uncompressed steps
LATEST_START = 1000
EPSILON = 1e-8  # added to a column's norm, so that a zero gradient stays zero
SHARE_BEFORE_START = 0.1  # of the run; the authors' recipes start after the first epochs


def start_step(total_steps: int) -> int:
    """Return the number of uncompressed steps: a tenth of the run, at least 2 and at most 1,000."""
    return max(EARLIEST_START, min(LATEST_START, round(SHARE_BEFORE_START * total_steps)))


class _Errors(dict[int, torch.Tensor]):
    """The error of each bucket. The host waits until it is computed.

    torch's hook computes it on a stream of its own, from a copy of the gradients that it frees when it returns. The
    stream of the backward pass could reuse that memory too early. torch itself waits only on "cuda", and only before.
    """

    def __setitem__(self, bucket: int, error: torch.Tensor) -> None:
        if accelerator.overlaps(error.device):
            accelerator.current_stream(error.device).synchronize()
        super().__setitem__(bucket, error)


class PowerSGDStrategy(DistributedStrategy):
    """Factors of rank `rank` from step `start_step(total_steps)` on.

    A bucket takes three all-reduces, each started when the previous one finishes. Gloo completes them on its own
    threads, so with several buckets in flight their order would differ between workers, and Gloo matches collectives by
    order. With Gloo, each bucket therefore finishes before the next starts. NCCL keeps the order of submission.

    Each worker has its own error, so a checkpoint stores those of all workers. After a resume with another number of
    workers, each starts with their mean, which preserves the mean of the gradients.
    """

    remembers_gradients = True
    """The compression error of a step is added to the next step's gradients."""

    def __init__(self, world: World, parallel: ParallelConfig, total_steps: int, seed: int):
        super().__init__(world, parallel)
        self.gathers_state = True
        self.waits_in = (*self.waits_in, "backward")
        self._one_at_a_time = world.device.type == "cpu" or parallel.dist_backend == "gloo"
        self._seed = seed
        self._hook_state = PowerSGDState(
            process_group=None,
            matrix_approximation_rank=parallel.powersgd_rank,
            start_powerSGD_iter=start_step(total_steps),
            orthogonalization_epsilon=EPSILON,
            random_seed=seed,
        )
        self._hook_state.error_dict = _Errors()

    def compress(self, ddp: DistributedDataParallel) -> None:
        ddp.register_comm_hook(self._hook_state, self._reduce_low_rank)

    def _reduce_low_rank(self, state: PowerSGDState, bucket: dist.GradBucket) -> Future:
        buffer = bucket.buffer()
        before = state.total_numel_after_compression
        future: Future = powerSGD_hook(state, bucket)
        numel = state.total_numel_after_compression - before or buffer.numel()  # no count: sent uncompressed
        self.traffic.plain_bytes += buffer.nbytes
        self.traffic.sent_bytes += numel * buffer.element_size()
        if self._one_at_a_time:
            future.wait()
        return future

    def forget_gradients(self) -> None:
        state = self._hook_state
        for memory in (state.error_dict, state.p_memory_dict, state.q_memory_dict):
            memory.clear()
        state.rng = np.random.RandomState((self._seed + state.iter) % 2**32)

    def rescale(self, factor: float) -> None:
        for error in self._hook_state.error_dict.values():
            error.mul_(factor)

    def state_dict(self) -> Tensors:
        state = self._hook_state
        tensors = {
            "steps": torch.tensor(state.iter, device="cpu"),
            "start": torch.tensor(state.start_powerSGD_iter, device="cpu"),
        }
        for bucket, error in sorted(state.error_dict.items()):
            mine = error.detach().cpu()
            rows = [torch.empty_like(mine) for _ in range(self._world.size)] if self._world.is_main else None
            dist.gather(mine, rows, dst=0, group=self._world.host_group)
            tensors |= {f"error.{bucket}.{rank}": row for rank, row in enumerate(rows or [])}
        for name, memory in (("p", state.p_memory_dict), ("q", state.q_memory_dict)):
            tensors |= {f"{name}.{bucket}": tensor.detach().cpu() for bucket, tensor in memory.items()}
        return tensors

    def load_state_dict(self, state: Tensors) -> None:
        if "steps" not in state:
            return  # the run was not compressed so far
        # Copy: tensors in a mapped file are unaligned, which changes the order of summation.
        hook, device = self._hook_state, self._world.device
        hook.iter, hook.start_powerSGD_iter = int(state["steps"]), int(state["start"])
        errors: dict[int, dict[int, torch.Tensor]] = {}
        for key, tensor in state.items():
            kind, *numbers = key.split(".")
            if kind == "error":
                bucket, rank = map(int, numbers)
                errors.setdefault(bucket, {})[rank] = tensor
            elif kind in ("p", "q"):
                memory = hook.p_memory_dict if kind == "p" else hook.q_memory_dict
                memory[int(numbers[0])] = tensor.to(device, copy=True)
        for bucket, by_rank in errors.items():
            same_workers = len(by_rank) == self._world.size
            error = by_rank[self._world.rank] if same_workers else torch.stack(list(by_rank.values())).mean(0)
            hook.error_dict[bucket] = error.to(device, copy=True)
