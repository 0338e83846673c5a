"""`lockstep export`: export a trained model for other programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from lockstep.cli.parse import Arch, parse
from lockstep.config.flags import Positional, arg
from lockstep.errors import ConfigError


@dataclass(frozen=True)
class ExportCommand:
    """Export a trained model as weights or as a program, and verify the result."""

    checkpoint: Annotated[Positional[Path], arg(metavar="CHECKPOINT")]
    """Run folder, checkpoint or exported .safetensors file."""
    format: tuple[Literal["safetensors", "torch", "onnx"], ...] = ()
    """File formats; torch: a torch.export program. Default: by --output, or safetensors."""
    output: Annotated[Path | None, arg(aliases=["-o"])] = None
    """Output file, for a single format. Default: CHECKPOINT's name, here."""
    arch: Arch = None
    """MODULE:FUNCTION of a custom model; its code is run."""
    with_normalization: bool = False
    """Export a program that takes uint8 pixels instead of normalized floats."""


def main(arguments: Sequence[str]) -> int:
    command = parse(ExportCommand, "export", arguments)
    from lockstep.train.export import SUFFIXES, default_output, export

    kinds = command.format or ("safetensors",)
    if command.output is not None and len(kinds) > 1:
        raise ConfigError(f"--output names one file, but --format {' '.join(kinds)} writes several")
    if command.output is not None and not command.format:
        by_suffix = {suffix: kind for kind, suffix in SUFFIXES.items()}
        if command.output.suffix not in by_suffix:
            raise ConfigError(f"--output {command.output}: must end in one of {', '.join(by_suffix)}; or add --format")
        kinds = (by_suffix[command.output.suffix],)
    for kind in kinds:
        output = command.output or default_output(command.checkpoint, kind)
        done = export(command.checkpoint, kind, output, command.with_normalization, command.arch)
        if done.difference is None:
            checked = "not run, because onnxruntime is not installed"
        elif kind == "safetensors":
            checked = "read back and equal"
        else:
            checked = f"read back; its logits differ from the model's by at most {done.difference:.1g}"
        print(f"{done.path}: {done.path.stat().st_size:,} bytes, {done.takes}; {checked}", flush=True)
    return 0
