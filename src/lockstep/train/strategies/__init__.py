"""Strategies that keep replicas equal. `base` is for a single worker, and has DataParallel."""

from __future__ import annotations

from lockstep.config.schema import TrainConfig
from lockstep.train.strategies.base import DataParallelStrategy, Strategy
from lockstep.world.world import World

__all__ = ["Strategy", "build_strategy"]


def build_strategy(config: TrainConfig, world: World, total_steps: int) -> Strategy:
    """Build the configured strategy; call `lockstep.config.schema.check_workers` first."""
    parallel, name = config.parallel, config.parallel.strategy
    if name == "auto":
        name = "ddp" if world.size > 1 else "single"
    if name == "dp":
        return DataParallelStrategy()
    if name == "horovod":
        from lockstep.train.strategies.horovod import HorovodStrategy

        return HorovodStrategy(world, parallel.compress)
    if name == "ddp":
        from lockstep.train.strategies.ddp import DistributedStrategy
        from lockstep.train.strategies.powersgd import PowerSGDStrategy

        if parallel.compress == "powersgd":
            return PowerSGDStrategy(world, parallel, total_steps, config.seed)
        return DistributedStrategy(world, parallel)
    return Strategy()
