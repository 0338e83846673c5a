"""`lockstep predict`: classify images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from lockstep.cli.parse import Arch, parse
from lockstep.config.flags import Positional, arg
from lockstep.data.sources.image_folder import images_in
from lockstep.errors import ConfigError, require
from lockstep.files.untrusted import printable_name


@dataclass(frozen=True)
class PredictCommand:
    """Classify images: print the most probable classes of each."""

    checkpoint: Annotated[Positional[Path], arg(metavar="CHECKPOINT")]
    """Run folder, checkpoint or exported .safetensors file."""
    images: Annotated[Positional[tuple[Path, ...]], arg(metavar="IMAGE")]
    """Image files, or folders of them."""
    arch: Arch = None
    """MODULE:FUNCTION of a custom model; its code is run."""
    top: int = 3
    """Number of classes to print per image."""

    def __post_init__(self) -> None:
        require(self.top >= 1, "--top", self.top, "at least 1")
        if not self.images:
            raise ConfigError("missing IMAGE; give the run or checkpoint, then images: lockstep predict RUN IMAGE")


def main(arguments: Sequence[str]) -> int:
    command = parse(PredictCommand, "predict", arguments)
    images = [image for path in command.images for image in (images_in(path) if path.is_dir() else [path])]
    from lockstep.train.inference import load_network, predict

    network = load_network(command.checkpoint, command.arch)
    for prediction in predict(network, images, command.top):
        named = "  ".join(f"{name} {100 * share:.1f} %" for name, share in prediction.classes)
        print(printable_name(f"{prediction.path}: {named}"), flush=True)
    return 0
