"""Everything that runs on a GPU also runs on one without float64, such as Apple's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import simgpu
import torch
import torch.nn.functional as F
from PIL import Image
from separable import linear_net, separable
from simulated_gpu import gpu_world, on_gpus, run_on_gpu
from torch import Tensor

from lockstep import hvd
from lockstep.__main__ import main
from lockstep.run.connect import TrainingWorld
from lockstep.train import fit
from lockstep.world.world import World

pytestmark = pytest.mark.usefixtures("simulated_gpu")
TRAIN = ["train", "digits", "--device", "gpu", "--epochs", "1", "-b", "64", "-p", "4", "--track", "--io-every", "0"]
MIXED = ["--mixup", "0.2", "--ema-decay", "0.9", "--clip-norm", "1"]
OPTIONS: dict[str, Sequence[str]] = {
    "AdamW, mixed images and clipped gradients": ("--optimizer", "adamw", *MIXED, "--precision", "bf16"),
    "LARS, and cut and mixed images in fp32": ("--optimizer", "lars", "--cutmix", "1", "--mixup", "0.2"),
    "LAMB with skipping": ("--optimizer", "lamb", "--on-nan", "skip", "--label-smoothing", "0.1"),
    "O1 with accumulation": ("--precision", "O1", "--accumulate", "2"),
}


def _run(*commands: Sequence[str]) -> None:
    simgpu.install(float64=False)
    for command in commands:
        assert main([*command]) == 0
    with pytest.raises(TypeError, match="float64"):
        torch.zeros(1, dtype=torch.float64, device="simgpu")


def test_training_needs_no_float64(tmp_path: Path) -> None:
    run_on_gpu(
        _run,
        *(
            [*TRAIN, "--max-steps", "3", *options, "--run-dir", str(tmp_path / name)]
            for name, options in OPTIONS.items()
        ),
    )


def test_commands_that_use_a_model_need_no_float64(tmp_path: Path) -> None:
    run, image, exported = (str(tmp_path / name) for name in ("run", "blank.png", "net.pt2"))
    Image.new("L", (8, 8)).save(image)
    run_on_gpu(
        _run,
        [*TRAIN, "--max-steps", "2", "--run-dir", run],
        ["eval", run, "--device", "gpu"],
        ["predict", run, image],
        ["export", run, "--format", "torch", "--with-normalization", "--output", exported],
        [*TRAIN, "--max-steps", "4", "--run-dir", run, "--resume", run],
    )


def _recall(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    right = outputs.argmax(1) == targets
    return torch.bincount(targets[right], minlength=3), torch.bincount(targets, minlength=3)


@on_gpus(2)
def test_fit_needs_no_float64(world: World, tmp_path: Path) -> None:
    simgpu.install(float64=False)
    with gpu_world():
        metrics: dict[str, Any] = {"recall": _recall}
        settings: dict[str, Any] = {"epochs": 1, "batch_size": 12, "loader_workers": 0, "track": (), "on_nan": "skip"}
        result = fit(linear_net(), separable(96, 1), separable(48, 2), metrics=metrics, run_dir=tmp_path, **settings)
    assert result.loss is not None


@on_gpus(2)
def test_own_loop_needs_no_float64(world: World, tmp_path: Path) -> None:
    simgpu.install(float64=False)
    with gpu_world() as connected:
        own = TrainingWorld(connected.rank_info, connected.device, connected.host_group)
        model = own.prepare(linear_net())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        train = own.loader(separable(96, 1), global_batch=12, shuffle=True)
        run = own.run(tmp_path, loader=train, log_every=2, model=model, optimizer=optimizer)
        for _ in run.epochs(1):
            for inputs, labels in train:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(inputs), labels)
                run.backward(loss, weight=len(labels))
                optimizer.step()
                run.step(loss=loss, hits=(labels == 0).float().mean())
            run.record(top1=own.mean(loss))
        run.close()


@on_gpus(2)
def test_hvd_needs_no_float64(world: World) -> None:
    simgpu.install(float64=False)
    hvd.init()
    device = torch.device("simgpu", world.rank)
    ones = torch.ones(3, device=device)
    assert hvd.allreduce(ones, op=hvd.Adasum, name="adasum").tolist() == [1, 1, 1]
    count = torch.tensor([(1 << 40) + 2], device=device)
    assert hvd.allreduce(count, op=hvd.Sum, prescale_factor=0.5, name="count").tolist() == [(1 << 40) + 2]
    hvd.shutdown()
