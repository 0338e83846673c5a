"""Strategies that keep replicas equal. `base` is for a single worker, and has DataParallel."""

from __future__ import annotations

from lockstep.config.schema import TrainConfig
from lockstep.train.strategies.base import DataParallelStrategy, Strategy
from lockstep.world.world import World

__all__ = ["Strategy", "build_strategy"]


def build_strategy(config: TrainConfig, world: World, total_steps: int) -> Strategy:
    """Build the configured strategy; call `lockstep.config.schema.check_workers` first.

    Args:
        total_steps: Optimizer steps of the whole run.
    """
    parallel, name = config.parallel, config.parallel.strategy
    if name == "auto":
        name = "ddp" if world.size > 1 else "single"
    if name == "dp":
        return DataParallelStrategy()
    if name == "horovod":
        from lockstep.train.strategies.horovod import HorovodStrategy

        return HorovodStrategy(world, parallel.compress)
    if name == "ddp":
        from lockstep.train.strategies.compression import HALF_HOOKS, GradientCompression, HalfCompression
        from lockstep.train.strategies.ddp import DistributedStrategy

        compression = GradientCompression()
        if parallel.compress == "powersgd":
            from lockstep.train.strategies.compression import PowerSGD

            by_gloo = world.device.type == "cpu" or parallel.dist_backend == "gloo"
            compression = PowerSGD(world, parallel.powersgd_rank, total_steps, config.seed, one_at_a_time=by_gloo)
        elif parallel.compress in HALF_HOOKS:
            compression = HalfCompression(parallel.compress)
        return DistributedStrategy(world, compression, parallel.find_unused_parameters, parallel.shard_optimizer)
    return Strategy()
