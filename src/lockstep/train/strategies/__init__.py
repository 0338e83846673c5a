"""How replicas are kept equal: one strategy a file; `base.py` is one worker alone."""

from __future__ import annotations

from lockstep.config import TrainConfig
from lockstep.train.strategies.base import Strategy
from lockstep.world import World

__all__ = ["Strategy", "build_strategy"]


def build_strategy(config: TrainConfig, world: World) -> Strategy:
    """The strategy that a configuration names; `lockstep.config.check_workers` has passed it."""
    name = config.parallel.strategy
    if name == "auto":
        name = "ddp" if world.size > 1 else "single"
    if name == "ddp":
        from lockstep.train.strategies.ddp import DistributedStrategy

        return DistributedStrategy(world, config.parallel.find_unused_parameters)
    return Strategy()
