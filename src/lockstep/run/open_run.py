"""Open the run of a user's own loop: check its arguments, lock its folder, and restore its newest state."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from lockstep.config.run_paths import typed_command
from lockstep.config.schema import TrainConfig
from lockstep.data.exact_loader import ExactLoader
from lockstep.errors import ConfigError
from lockstep.files.output import say
from lockstep.observe.io_sampling import IoSampler
from lockstep.run.messages import name_arguments
from lockstep.run.named_states import EXTRA, Extra, Stateful, is_sharded
from lockstep.run.position import LoopPosition
from lockstep.run.random_state import RandomState
from lockstep.run.records.run_folder import holding_run
from lockstep.run.records.trackers import INFO, Tracker
from lockstep.run.replicas import check_shares
from lockstep.run.resume import find_resume_point, open_session, restore
from lockstep.run.session import RunDescription
from lockstep.run.settings import classes_of, describe_overridden, order_of, settings_of
from lockstep.run.training_run import TrainingRun
from lockstep.world.world import World

SETTINGS = "settings"  # in the job of a checkpoint, with what must be equal
NAMES = ("data", "arch")  # in the record of the run


class LoopConsole(Tracker):
    """Prints lines on stderr: stdout belongs to the program."""

    def say(self, line: str, level: int = INFO) -> None:
        if level >= INFO:
            say(f"lockstep: {name_arguments(line)}")


def open_run(
    world: World,
    random: RandomState,
    config: TrainConfig,
    loader: ExactLoader | None,
    state: Mapping[str, nn.Module | Stateful],
    about: Mapping[str, str],
) -> TrainingRun:
    """Open a run folder and restore its newest state; see `TrainingWorld.run`. Collective."""
    for name, each in state.items():
        if not isinstance(each, Stateful):
            raise ConfigError(f"{name}=: a {type(each).__name__} has no state_dict and load_state_dict to save it with")
    classes, settings, overridden = classes_of(state), settings_of(state), list[str]()
    identity: dict[str, Any] = {"states": sorted(state), "seed of the run": config.seed, **classes}
    begin: dict[str, Any] = {"workers": world.size, "script": typed_command()}
    if unknown := about.keys() - NAMES:
        raise ConfigError(f"about=: unknown name {min(unknown)!r}; give {' or '.join(NAMES)}")
    begin |= {name: str(value) for name, value in about.items()}
    if loader is not None:
        if (sharding := loader.sharding) is None:
            raise ConfigError("loader=: is the loader of an evaluation; give that of the training")
        identity |= {"samples": sharding.samples, "global_batch": sharding.global_batch, "seed": sharding.seed}
        identity |= {"drop_last": sharding.drop_last, "order": order_of(loader)}
        begin |= {"global_batch": sharding.global_batch, "steps_per_epoch": sharding.steps_per_epoch}
    loaders = [each for each in (loader, *state.values()) if isinstance(each, ExactLoader)]
    for sharding in (each.sharding for each in loaders):
        for model in state.values():
            if sharding and isinstance(model, nn.Module):
                check_shares(model, sharding, "pass drop_last=True")
    with ExitStack() as stack:
        held = stack.enter_context(holding_run(config, world))
        point = find_resume_point(config, world)
        position, extra = LoopPosition(), Extra()
        shards = any(world.gather(any(is_sharded(each) for each in state.values() if isinstance(each, nn.Module))))
        is_gathered = shards or any(isinstance(each, ZeroRedundancyOptimizer) for each in state.values())
        described = RunDescription(
            identity,
            {EXTRA: extra, **state},
            "to resume: the same command" + ("" if config.run.resume else ", without resume=False"),
            {},
            LoopConsole,
            has_recipe=False,
            gathers_state=is_gathered,
            is_sharded=shards,
            differs_by_host=not is_gathered,
        )
        if point.state is not None:
            position, stored = restore(point, described, LoopPosition, ["order", *classes])
            first = dict(stored.job.get(SETTINGS, {}))
            overridden, settings = describe_overridden(settings, first), settings | first
        identity[SETTINGS] = settings  # not compared, since the state was restored before
        session = open_session(point, config, world, held, described, position)
        session.begin()
        session.record("run", **begin)
        io = IoSampler(config.run.io_every, counts_node=world.rank_info.local_rank == 0)
        stack.enter_context(io.recording(held.folder.path, world.rank))
        session.say([*point.notes, *io.notes, *overridden])
        if position.step:
            session.say([f"resumed after step {position.step:,}, in epoch {position.epoch + 1}, from {point.state}"])
        figures = position.figures if world.is_main else {}  # those of all workers
        run = TrainingRun(session, random, loader, extra, figures)
        stack.push(run.held)
        stack.callback(run.end)
        for each in loaders:
            stack.callback(each.close)
        run.held = stack.pop_all()
    return run
