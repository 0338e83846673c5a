"""Changes that are applied to a program from outside."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules import module as modules
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

from lockstep.observe.outside_changes import apply


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter([1])


groups = []  # kept: a thread of Gloo's that is the last to hold its group, after a hook, cannot end itself


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    groups.append(dist.group.WORLD)
    yield
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def unchanged() -> Iterator[None]:
    before, init = dict(modules._global_module_registration_hooks), DataLoader.__init__
    yield
    DataLoader.__init__ = init
    modules._global_module_registration_hooks.clear()
    modules._global_module_registration_hooks.update(before)


def test_loaders_of_map_style_data_are_changed() -> None:
    apply("loader=2")
    assert DataLoader([1], 4).num_workers == 2
    assert DataLoader([1], num_workers=5, shuffle=True).num_workers == 2
    assert DataLoader(Stream()).num_workers == 0


def test_unknown_changes_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown change: other"):
        apply("other")


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("change", ["compress", "powersgd"])
def test_a_model_without_a_hook_gets_one(change: str) -> None:
    apply(change)
    model = DistributedDataParallel(nn.Linear(2000, 300))
    assert not model._comm_hooks
    for _ in range(4):
        model(torch.ones(1, 2000)).sum().backward()
    assert len(model._comm_hooks) == 1


@pytest.mark.usefixtures("group")
def test_a_models_own_hook_stays() -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

    apply("powersgd")
    model = DistributedDataParallel(nn.Linear(20, 3))
    state = PowerSGDState(None, start_powerSGD_iter=1000)
    model.register_comm_hook(state, powerSGD_hook)
    model(torch.ones(1, 20)).sum().backward()
    assert len(model._comm_hooks) == 1
    assert state.start_powerSGD_iter == 2
