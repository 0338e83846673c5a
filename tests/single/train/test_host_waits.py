"""The host never waits for an accelerator in a training step, but where the table says so.

There is no accelerator here: the trainer's own step runs on torch's fake CUDA tensors, which have a device and a shape
but no values, and each operation that would block the host is counted with the line that asked for it.
"""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lockstep.config.schema import TrainConfig
from lockstep.data.batch import Batch
from lockstep.data.sources import digits
from lockstep.nn.global_batch_norm import GlobalBatchNorm
from lockstep.train.fit import configure
from lockstep.train.guards.nonfinite import build_guard
from lockstep.train.job import Job
from lockstep.train.job_parts import Network
from lockstep.train.loop import take_step
from lockstep.train.metrics import Meter
from lockstep.train.optim.build import build_optimizer
from lockstep.train.optim.ema import build_average
from lockstep.train.precision import build_precision
from lockstep.train.setup import build_job
from lockstep.world import accelerator
from lockstep.world.launcher_environment import RankInfo
from lockstep.world.world import World

DEVICE = torch.device("cuda", 0)
PAGE = Path(__file__).parents[3] / "docs" / "explanation" / "performance.md"
STEPS = 3

# A row of the table on the page, settings, and how often the host waits in each step.
TABLE: dict[str, tuple[dict[str, Any], int]] = {
    "`--precision fp32`": ({}, 0),
    "`--precision bf16`": ({"precision": "bf16"}, 0),
    "`--precision O1`": ({"precision": "O1"}, 0),
    "`--precision O2`": ({"precision": "O2"}, 0),
    "`--precision O3`": ({"precision": "O3"}, 0),
    "`--precision O3 --loss-scale dynamic`": ({"precision": "O3", "loss_scale": "dynamic"}, 0),
    "`--precision O1 --optimizer adamw`": ({"precision": "O1", "optimizer": "adamw"}, 0),
    "`--precision O1 --optimizer lars`": ({"precision": "O1", "optimizer": "lars"}, 0),
    "`--precision O1 --optimizer lamb`": ({"precision": "O1", "optimizer": "lamb"}, 0),
    "`--precision O2 --ema-decay 0.99 --clip-norm 1`": ({"precision": "O2", "ema_decay": 0.99, "clip_norm": 1.0}, 0),
    "`--optimizer adam`": ({"optimizer": "adam"}, 0),
    "`--optimizer adamw`": ({"optimizer": "adamw"}, 0),
    "`--optimizer lars`": ({"optimizer": "lars"}, 0),
    "`--optimizer lamb`": ({"optimizer": "lamb"}, 0),
    "`--ema-decay 0.99`": ({"ema_decay": 0.99}, 0),
    "`--clip-norm 1`": ({"clip_norm": 1.0}, 0),
    "`--accumulate 2`": ({"accumulate": 2}, 0),
    "`--label-smoothing 0.1`": ({"label_smoothing": 0.1}, 0),
    "`--sync-bn` with `--strategy horovod`": ({"sync_bn": True}, 0),
    "`--on-nan stop`": ({"on_nan": "stop"}, 0),
    "`--on-nan rewind`": ({"on_nan": "rewind"}, 0),
    "`--on-nan skip`": ({"on_nan": "skip"}, 1),
}
READS = ("_local_scalar_dense", "nonzero", "equal.default", "masked_select", "unique", "is_nonzero")


class HostWaits(TorchDispatchMode):
    """Collects the operations for which the host would wait until an accelerator has done all before them."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, str(func)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if any(tensor.is_cuda for tensor in tensors) and self._reads(name, args):
            self.note(name)
        if "_fused_" in name:  # fake tensors have no kernel for it
            return None
        try:
            result = func(*args, **kwargs)
        except DataDependentOutputException:
            return 1.0  # a value that there is not
        source, target = (
            (tensors[0], result) if "_to_copy" in name else (tensors[-1], tensors[0]) if tensors else (0, 0)
        )
        blocks = not kwargs.get("non_blocking") and not any(argument is True for argument in args)
        if ("_to_copy" in name or "copy_.default" in name) and blocks and source.device.type != target.device.type:
            self.note(f"{name} from {source.device.type} to {target.device.type}")
        return result

    def _reads(self, name: str, args: Any) -> bool:
        by_mask = "index" in name and any(
            isinstance(leaf, torch.Tensor) and leaf.dtype == torch.bool for leaf in tree_leaves(args[1:2])
        )
        return by_mask or any(read in name for read in READS)

    def note(self, what: str) -> None:
        ours = [frame for frame in traceback.extract_stack() if "/lockstep/" in frame.filename]
        where = f"{ours[-1].filename.split('/lockstep/')[-1]}:{ours[-1].lineno}" if ours else "outside Lockstep"
        self.seen.append(f"{what} at {where}")


class Device:
    """The device's order of work, by the backward passes that were enqueued."""

    def __init__(self, waits: HostWaits) -> None:
        self.passes, self.waits = 0, waits

    def give_gradients(self, model: nn.Module) -> None:
        self.passes += 1
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.add_(1)


class Mark:
    """An event, and the stream that records it; waiting counts if the device would have nothing else to do."""

    def __init__(self, device: Device) -> None:
        self._device, self._passes = device, -1

    def record_event(self, event: Mark) -> None:
        event._passes = self._device.passes

    def synchronize(self) -> None:
        if self._device.passes <= self._passes:
            self._device.waits.note("Event.synchronize before the next backward pass")


class Alone:
    """The peers of a batch norm, two of them and alike."""

    def gather(self, row: torch.Tensor) -> torch.Tensor:
        return torch.stack([row, row])

    def sum(self, row: torch.Tensor) -> torch.Tensor:
        return row * 2


def _net(sync_bn: bool) -> nn.Module:
    norm: nn.Module = nn.BatchNorm2d(4)
    if sync_bn:
        norm = GlobalBatchNorm(4)
        norm.peers = Alone()
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, bias=False), norm, nn.ReLU(), nn.Dropout(0.1), nn.Flatten(), nn.Linear(144, 300)
    )


def _job(folder: Path, settings: dict[str, Any]) -> Job:
    """A job of one worker whose model, optimizer and figures are on the fake device; the rest is on the CPU."""
    settings = {"epochs": 2, "global_batch_size": 96, "lr": 0.05, "track": (), "device": "cpu", **settings}
    config = configure(run_dir=folder / "run", **settings)
    plain = dataclasses.replace(config.numerics, precision="fp32", loss_scale=None)
    on_cpu = dataclasses.replace(config, numerics=plain)
    model: nn.Module = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    job = build_job(on_cpu, World(RankInfo(), torch.device("cpu")), digits.load(), model)
    with FakeTensorMode(allow_non_fake_inputs=True):
        return _on_fake_device(job, config)


def _on_fake_device(job: Job, config: TrainConfig) -> Job:
    world = World(RankInfo(), DEVICE)
    precision = build_precision(config.numerics, DEVICE.type)
    with DEVICE:
        model = precision.prepare(_net(config.parallel.sync_bn))
    weights = precision.weights_of(model)
    optimizer = build_optimizer(weights, config.optim, job.optim.strategy)
    average = build_average(model, weights, config.model.ema_decay)
    return dataclasses.replace(
        job,
        config=config,
        world=world,
        network=Network(model, weights, replica=model),
        optim=dataclasses.replace(job.optim, precision=precision, optimizer=optimizer, average=average),
        meter=Meter(world),
        guard=build_guard(config.numerics, precision, DEVICE.type),
    )


@pytest.mark.filterwarnings("ignore:CUDA is not available", "ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize("row", TABLE)
def test_the_host_waits_as_often_as_the_table_says(row: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, expected = TABLE[row]
    monkeypatch.setattr(nn.Module, "_apply", _convert)
    job = _job(tmp_path, settings)
    waits = HostWaits()
    device = Device(waits)
    monkeypatch.setattr(
        torch.Tensor, "backward", lambda losses, factors: device.give_gradients(job.network.model)
    )  # torch's needs a driver
    monkeypatch.setattr(accelerator, "new_event", lambda _, timing=False: Mark(device))
    monkeypatch.setattr(accelerator, "current_stream", lambda _: Mark(device))
    with FakeTensorMode(allow_non_fake_inputs=True):
        images = torch.randn(96, 1, 8, 8, device=DEVICE, dtype=job.optim.precision.input_dtype)
        batch = Batch(images, torch.randint(0, 10, (96,), device=DEVICE))
        for step in range(STEPS):
            waits.seen.clear()
            with waits:
                take_step(job, batch, 0)
            job.progress.step += 1
            assert len(waits.seen) == expected, f"step {step + 1}: " + "; ".join(waits.seen)
    job.close()


def test_the_page_has_the_same_table() -> None:
    rows = [line.strip("| ").split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| `--")]
    found = {row[0]: int(row[1]) for row in rows if len(row) == 2 and row[1].isdecimal()}
    assert found == {row: waits for row, (_, waits) in TABLE.items()}


def _convert(module: nn.Module, change: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
    """Module._apply for fake parameters, which torch's own cannot replace."""
    for each in module.modules():
        for name, parameter in each._parameters.items():
            each._parameters[name] = parameter if parameter is None else nn.Parameter(change(parameter.detach()))
        for name, buffer in each._buffers.items():
            each._buffers[name] = buffer if buffer is None else change(buffer)
    return module
