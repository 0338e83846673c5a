"""`lockstep data prepare imagenet`: ImageNet's folders from its official archives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from lockstep.cli.parse import parse
from lockstep.errors import DataError


@dataclass(frozen=True)
class PrepareCommand:
    """Make DEST/train/CLASS/*.JPEG and DEST/val/CLASS/*.JPEG from ImageNet's official archives (ILSVRC2012).

    The same command goes on where it was stopped; what is there already is compared by names and sizes.
    """

    name: Annotated[Positional[Literal["imagenet"]], arg(metavar="imagenet")]
    """The data set."""
    train: Annotated[Positional[Path], arg(metavar="TRAIN.tar")]
    """ILSVRC2012_img_train.tar, which holds one tar a class."""
    val: Annotated[Positional[Path], arg(metavar="VAL.tar")]
    """ILSVRC2012_img_val.tar, which holds the validation images."""
    devkit: Annotated[Positional[Path], arg(metavar="DEVKIT.tar.gz")]
    """ILSVRC2012_devkit_t12.tar.gz, which holds the validation images' labels."""
    dest: Annotated[Positional[Path], arg(metavar="DEST")]
    """The folder to make, such as data/imagenet."""
    md5: bool = False
    """First compare each archive's MD5 sum with the official one, and stop if it is another; reads all once more."""


def main(words: Sequence[str]) -> int:
    command = parse(PrepareCommand, "data prepare", words)
    from lockstep.cli.data.progress import progress
    from lockstep.data.sources import prepare_imagenet

    archives = prepare_imagenet.look(command.train, command.val, command.devkit)
    if command.md5:
        for path, kind in ((command.train, "training"), (command.val, "validation"), (command.devkit, "devkit")):
            digest, official = prepare_imagenet.md5(path, kind)
            print(f"{path}: MD5 {digest}, {'the' if official else 'not the'} official {kind} archive", flush=True)
            if not official:
                raise DataError(f"{path} is not the official {kind} archive; fetch it again, or leave out --md5")
    with progress("preparing", command.train.stat().st_size + command.val.stat().st_size, "bytes") as advance:
        train, val = prepare_imagenet.prepare(archives, command.dest, advance)
    print(
        f"{command.dest}: {train:,} + {val:,} images, {len(archives.classes):,} classes; lockstep train {command.dest}"
    )
    return 0
