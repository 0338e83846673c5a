"""`lockstep eval`: evaluate a checkpoint on a data set's validation images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from lockstep.cli.parse import Arch, Workers, parse
from lockstep.config.flags import Positional, arg
from lockstep.config.schema import DataConfig, DeviceChoice, NumericsConfig, TrainConfig
from lockstep.data import catalog
from lockstep.launch.command_workers import WorkerCommand, run_workers
from lockstep.world.world import World


@dataclass(frozen=True)
class EvalCommand:
    """Evaluate a checkpoint on a data set's validation images."""

    checkpoint: Annotated[Positional[Path], arg(metavar="CHECKPOINT")]
    """Run folder, checkpoint, .safetensors file, or older script's checkpoint."""
    data: DataConfig = field(default_factory=DataConfig)
    arch: Arch = None
    """Model; needed for MODULE:FUNCTION, or if the file does not name it."""
    batch_size: Annotated[int, arg(aliases=["-b"])] = 64
    """Images per worker and forward pass."""
    precision: Literal["fp32", "tf32", "bf16", "fp64"] = "fp32"
    """Precision; tf32: matrix products; bf16: autocast."""
    tta: bool = False
    """Test-time augmentation: average the logits of each image and its mirror image."""
    device: DeviceChoice = "auto"
    """Device; auto: the GPU if there is one."""
    workers: Workers = None
    """Workers on this machine; auto: one per GPU. Default: 1."""


def main(arguments: Sequence[str]) -> int:
    command = parse(EvalCommand, "eval", arguments)
    config = TrainConfig(
        data=command.data,
        batch_size=command.batch_size,
        numerics=NumericsConfig(precision=command.precision),
        device=command.device,
    )
    if command.data.dataset:
        catalog.check(command.data)
    work = partial(_work, config, command.checkpoint, command.arch, command.tta)
    return run_workers(WorkerCommand(["eval", *arguments], work, command.device, command.workers))


def _work(config: TrainConfig, checkpoint: Path, arch: str | None, tta: bool, world: World) -> None:
    from lockstep.train.inference import evaluate_checkpoint, summarize

    figures = evaluate_checkpoint(config, world, checkpoint, arch, tta)
    if world.is_main:
        print(summarize(figures, world))
