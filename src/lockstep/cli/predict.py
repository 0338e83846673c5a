"""`lockstep predict`: name what is on images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from lockstep.cli.parse import Arch, parse
from lockstep.data.sources.folder_listing import images_in
from lockstep.errors import ConfigError
from lockstep.files.untrusted import printable_name


@dataclass(frozen=True)
class PredictCommand:
    """Name what is on images: the most probable classes and their probabilities."""

    checkpoint: Annotated[Positional[Path], arg(metavar="CHECKPOINT")]
    """A run folder, a checkpoint folder or an exported .safetensors file."""
    images: Annotated[Positional[tuple[Path, ...]], arg(metavar="IMAGE")]
    """Image files, or folders of them."""
    arch: Arch = None
    """The network, where it is MODULE:FUNCTION: that code is run."""
    top: int = 3
    """Classes to name for each image."""

    def __post_init__(self) -> None:
        if self.top < 1:
            raise ConfigError(f"--top must be 1 or more; got {self.top}")
        if not self.images:
            raise ConfigError("give the run or checkpoint first, then at least one image: lockstep predict RUN IMAGE")


def main(words: Sequence[str]) -> int:
    command = parse(PredictCommand, "predict", words)
    images = [image for path in command.images for image in (images_in(path) if path.is_dir() else [path])]
    from lockstep.train.inference import load_network, predict

    network = load_network(command.checkpoint, command.arch)
    for prediction in predict(network, images, command.top):
        named = "  ".join(f"{name} {100 * share:.1f} %" for name, share in prediction.classes)
        print(printable_name(f"{prediction.path}: {named}"), flush=True)
    return 0
