"""Open the run of a user's own loop: check its arguments, lock its folder, and restore its newest state.

A resume compares settings of the script with those of the run: the order of samples, classes of states, and rates.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lockstep.config.run_paths import typed_command
from lockstep.config.schema import TrainConfig
from lockstep.data.exact_loader import ExactLoader
from lockstep.data.seeded_samples import digest_of
from lockstep.data.shares import Shares
from lockstep.errors import ConfigError, plural
from lockstep.files.output import say
from lockstep.observe.io_sampling import IoSampler
from lockstep.run.messages import name_arguments
from lockstep.run.named_states import EXTRA, SETTINGS, Extra, LoopChanges, Stateful, is_sharded, places_of
from lockstep.run.position import LoopPosition
from lockstep.run.random_state import RandomState
from lockstep.run.records.run_folder import holding_run
from lockstep.run.records.trackers import INFO, Tracker
from lockstep.run.replicas import check_shares
from lockstep.run.resume import find_resume_point, open_session, restore
from lockstep.run.session import RunDescription
from lockstep.run.training_run import TrainingRun
from lockstep.world.world import World

NAMES = ("data", "arch")  # in the record of the run
DERIVED = ("params", "initial_lr", "base_lrs")  # the last two follow from lr


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
    check_stored(state)
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
        folder = stack.enter_context(holding_run(config, world))
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
            changes=LoopChanges({"loader": loader, **state}),
        )
        if point.state is not None:
            position, _ = restore(point, described, LoopPosition)
            first = described.changes.settings
            overridden, settings = describe_overridden(settings, first), settings | first
        identity[SETTINGS] = settings  # not compared, since the state was restored before
        session = open_session(point, config, world, folder, described, position)
        session.begin()
        session.record("run", **begin)
        io = IoSampler(config.run.io_every, counts_node=world.rank_info.local_rank == 0)
        stack.enter_context(io.recording(folder.path, world.rank))
        session.say([*point.notes, *io.notes, *overridden])
        if position.step:
            session.say([f"resumed after step {position.step:,}, in epoch {position.epoch + 1}, from {point.state}"])
        run = TrainingRun(session, random, loader, extra, position.figures if world.is_main else {})  # of all workers
        stack.push(run.held)
        stack.callback(run.end)
        for each in loaders:
            stack.callback(each.close)
        run.held = stack.pop_all()
    return run


def check_stored(state: Mapping[str, Any]) -> None:
    """Raise ConfigError if an optimizer trains parameters that are in no state: checkpoints would lose them."""
    models = [each for each in state.values() if isinstance(each, nn.Module)]
    others = [each for each in state.values() if not isinstance(each, nn.Module | Optimizer | ExactLoader)]
    held = {id(parameter) for model in models for parameter in model.parameters()}
    for name, each in state.items():
        groups = each.param_groups if isinstance(each, Optimizer) else []
        if lost := [parameter for group in groups for parameter in group["params"] if id(parameter) not in held]:
            if places_of([lost]) <= places_of(other.state_dict() for other in others):
                continue
            raise ConfigError(
                f"{name}= trains {plural(len(lost), 'parameter')} that checkpoints would lose, such as one of shape "
                f"{list(lost[0].shape)}: pass the module that has them, too, by a name of your choice"
            )


def order_of(loader: ExactLoader) -> str:
    """Return the arguments of a training loader that choose the order of an epoch. Collective if it has a sampler."""
    shares = loader.shares
    assert isinstance(shares, Shares)
    if shares.sampler is None:
        return f"shuffle={shares.shuffle}"
    return f"sampler={type(shares.sampler).__name__} (order {digest_of([shares.order(0)])[:8]})"


def classes_of(state: Mapping[str, Any]) -> dict[str, str]:
    """Return the classes of the states; models are compared by their tensors."""
    others = {name: each for name, each in state.items() if not isinstance(each, nn.Module)}
    return {f"class of {name}": type(each).__name__ for name, each in others.items()}


def settings_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings, as JSON, with which a script has made optimizers, schedulers and a GradScaler."""
    return {name: value for name, each in state.items() for name, value in _settings(name, each)}


def _settings(name: str, each: Any) -> Iterator[tuple[str, Any]]:
    groups: Sequence[Mapping[str, Any]] = ()
    if isinstance(each, Optimizer):
        groups = each.param_groups
    elif isinstance(each, LRScheduler | torch.amp.GradScaler):
        groups = [each.state_dict()]
    for index, group in enumerate(groups):
        prefix = f"{name}: " if len(groups) == 1 else f"{name}: group {index}: "
        for key, value in group.items():
            number = value.tolist() if isinstance(value, torch.Tensor) else value
            if key not in DERIVED and not key.startswith("_") and _is_plain(number):
                yield prefix + key, json.loads(json.dumps(number))


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def describe_overridden(own: Mapping[str, Any], stored: Mapping[str, Any]) -> list[str]:
    """Return a line for each setting that a script was resumed with, and for which the checkpoint's was taken."""
    return [
        f"{name}={own[name]} is not used, but the checkpoint's state, which began with {stored[name]}; to change it, "
        f"set it after world.run()"
        for name in own
        if name in stored and stored[name] != own[name]
    ]
