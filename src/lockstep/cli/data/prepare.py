"""`lockstep data prepare imagenet`: extract ImageNet's official archives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from lockstep.cli.parse import parse
from lockstep.config.flags import Positional, arg
from lockstep.errors import DataError


@dataclass(frozen=True)
class PrepareCommand:
    """Extract ImageNet's official archives (ILSVRC2012) into DEST/train/CLASS and DEST/val/CLASS.

    To resume, run the same command again; extracted files are compared by name and size.
    """

    name: Annotated[Positional[Literal["imagenet"]], arg(metavar="imagenet")]
    """Data set."""
    train: Annotated[Positional[Path], arg(metavar="TRAIN.tar")]
    """ILSVRC2012_img_train.tar, the training images."""
    val: Annotated[Positional[Path], arg(metavar="VAL.tar")]
    """ILSVRC2012_img_val.tar, the validation images."""
    devkit: Annotated[Positional[Path], arg(metavar="DEVKIT.tar.gz")]
    """ILSVRC2012_devkit_t12.tar.gz, the validation labels."""
    dest: Annotated[Positional[Path], arg(metavar="DEST")]
    """Folder to create, such as data/imagenet."""
    md5: bool = False
    """First compare each archive's MD5 checksum with the official one."""


def main(arguments: Sequence[str]) -> int:
    command = parse(PrepareCommand, "data prepare", arguments)
    from lockstep.cli.data.progress import progress
    from lockstep.data.sources import prepare_imagenet

    archives = prepare_imagenet.look(command.train, command.val, command.devkit)
    if command.md5:
        for path, kind in ((command.train, "training"), (command.val, "validation"), (command.devkit, "devkit")):
            digest, official = prepare_imagenet.md5(path, kind)
            print(f"{path}: MD5 {digest}, {'the' if official else 'not the'} official {kind} archive", flush=True)
            if not official:
                raise DataError(f"{path} is not the official {kind} archive; download it again, or remove --md5")
    with progress("preparing", command.train.stat().st_size + command.val.stat().st_size, "bytes") as advance:
        train, val = prepare_imagenet.prepare(archives, command.dest, advance)
    print(
        f"{command.dest}: {train:,} + {val:,} images, {len(archives.classes):,} classes; lockstep train {command.dest}"
    )
    return 0
