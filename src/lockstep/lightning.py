"""A strategy for Lightning's Trainer that reduces gradients with Lockstep; works with all of Lockstep's launchers.

    trainer = lightning.pytorch.Trainer(strategy=LockstepStrategy())

The base class, Lightning's DDPStrategy, handles metrics, samplers, checkpoints and barriers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

try:
    import lightning.pytorch as pl
except ModuleNotFoundError as error:
    raise ImportError("LockstepStrategy needs Lightning: pip install 'lockstep-torch[lightning]'") from error
import torch
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.strategies import DDPStrategy
from lightning_utilities.core.rank_zero import rank_zero_only

from lockstep import hvd
from lockstep.errors import ConfigError
from lockstep.world.launcher_environment import RankInfo
from lockstep.world.world import connect

NEVER = 1 << 30  # more backward passes than any step has, so that gradients are not reduced


class LockstepEnvironment(ClusterEnvironment):
    """Rank info from the launcher's environment variables."""

    def __init__(self) -> None:
        self._rank_info = RankInfo.from_environment()

    @staticmethod
    def detect() -> bool:
        """Return whether a launcher started this process as one of several workers."""
        return RankInfo.from_environment().size > 1

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        raise NotImplementedError("main_address is not used: lockstep.world connects the workers")

    @property
    def main_port(self) -> int:
        raise NotImplementedError("main_port is not used: lockstep.world connects the workers")

    def world_size(self) -> int:
        return self._rank_info.size

    def global_rank(self) -> int:
        return self._rank_info.rank

    def local_rank(self) -> int:
        return self._rank_info.local_rank

    def node_rank(self) -> int:
        return self._rank_info.node

    def set_world_size(self, size: int) -> None:
        """Do nothing: the launcher sets the size."""

    def set_global_rank(self, rank: int) -> None:
        """Do nothing: the launcher sets the rank."""


class LockstepStrategy(DDPStrategy):
    """Reduces gradients with `lockstep.hvd` during the backward pass. Each process is one worker.

    The launcher sets the number of workers, so the Trainer needs no `devices` and `num_nodes`. Each worker uses the
    GPU whose index is its local rank, if there are GPUs.

    Args:
        optimizer_options: Further arguments of `hvd.DistributedOptimizer`, such as
            `compression=hvd.Compression.fp16` or `op=hvd.Sum`. Instead of `backward_passes_per_step`, use the
            Trainer's `accumulate_grad_batches`.
    """

    strategy_name = "lockstep"

    def __init__(self, **optimizer_options: Any) -> None:
        super().__init__(cluster_environment=LockstepEnvironment())
        self._optimizer_options = optimizer_options
        self._connections = ExitStack()

    @property
    def root_device(self) -> torch.device:
        assert self.parallel_devices
        if self.parallel_devices[0].type == "cpu":
            return torch.device("cpu")
        if self.local_rank >= len(self.parallel_devices):
            raise ConfigError(
                f"worker {self.global_rank} has local rank {self.local_rank}, but the Trainer has "
                f"{len(self.parallel_devices)} devices; omit `devices`, or start fewer workers per host"
            )
        return self.parallel_devices[self.local_rank]

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def set_world_ranks(self) -> None:
        rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined] # lightning.fabric uses the same object

    def setup_distributed(self) -> None:
        reset_seed()
        self.set_world_ranks()
        self._connections.enter_context(connect(RankInfo.from_environment(), self.root_device.type))  # type: ignore[arg-type]
        hvd.init()
        self._connections.callback(hvd.shutdown)

    def configure_ddp(self) -> None:
        """Broadcast rank 0's weights; the model is not wrapped."""
        assert self.model is not None
        hvd.broadcast_parameters(self.model.state_dict(), root_rank=0)

    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        super().setup_optimizers(trainer)
        assert self.model is not None
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        self.optimizers = [
            hvd.DistributedOptimizer(
                optimizer,
                named_parameters=[
                    (names.get(parameter, f"optimizer{number}.{group}.{index}"), parameter)
                    for group, content in enumerate(optimizer.param_groups)
                    for index, parameter in enumerate(content["params"])
                ],
                **self._optimizer_options,
            )
            for number, optimizer in enumerate(self.optimizers)
        ]

    @property
    def _is_automatic(self) -> bool:
        return self.lightning_module is not None and self.lightning_module.automatic_optimization

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Return a context manager in which gradients accumulate without reduction."""
        self._set_passes(NEVER)
        try:
            yield
        finally:
            self._set_passes(1)

    def _set_passes(self, passes: int) -> None:
        for optimizer in self.optimizers:
            optimizer.backward_passes_per_step = passes  # type: ignore[attr-defined]

    def post_backward(self, closure_loss: torch.Tensor) -> None:
        """Wait for the reduction before gradient clipping. In manual optimization, `step` or `synchronize` waits."""
        if self._is_automatic:
            for optimizer in self.optimizers:
                if optimizer.backward_passes_per_step != NEVER:  # type: ignore[attr-defined]
                    optimizer.synchronize()  # type: ignore[attr-defined]

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        with optimizer.skip_synchronize() if self._is_automatic else nullcontext():
            return super().optimizer_step(optimizer, closure, model, **kwargs)

    def teardown(self) -> None:
        super().teardown()
        self._connections.close()
