"""`lockstep train`: train a network on a data set or a folder of images."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from lockstep.cli.parse import parse_train
from lockstep.cli.workers import run_workers
from lockstep.config import TrainConfig, check_workers
from lockstep.world import World


def main(words: Sequence[str]) -> int:
    command = parse_train(words)
    config = command.job
    if command.print_config:
        import yaml

        from lockstep.config_mapping import to_mapping

        print(yaml.safe_dump(to_mapping(config), sort_keys=False), end="")
        return 0
    from lockstep.data import catalog

    catalog.check(config.data)
    work = partial(_evaluate if config.run.evaluate else _train, config)
    check = partial(check_workers, config)
    backend = config.parallel.dist_backend
    return run_workers("train", words, command.workers, config.device, work, check, command.where, backend)


def _train(config: TrainConfig, world: World) -> None:
    from lockstep.train import run

    run(config, world)


def _evaluate(config: TrainConfig, world: World) -> None:
    from lockstep.train.inference import evaluate_checkpoint, summarize

    figures = evaluate_checkpoint(config, world, Path(str(config.run.resume)))
    if world.is_main:
        print(summarize(figures, world))
