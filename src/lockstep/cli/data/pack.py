"""`lockstep data pack`: pack a folder of images into a few large files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from lockstep.cli.data.processes_flag import Jobs, check_jobs, cores
from lockstep.cli.parse import parse
from lockstep.errors import ConfigError
from lockstep.files.untrusted import printable_name


@dataclass(frozen=True)
class PackCommand:
    """Pack a folder of images into WebDataset tar files with an index; `lockstep train OUT` reads them like the folder.

    The same command goes on where it was stopped. Without --short-side and --format, files are stored byte for byte.
    """

    folder: Annotated[Positional[Path], arg(metavar="FOLDER")]
    """The images: FOLDER/train/CLASS/... and FOLDER/val/CLASS/... (or test)."""
    out: Annotated[Positional[Path], arg(metavar="OUT")]
    """The folder to make."""
    short_side: Annotated[int | None, arg(metavar="PIXELS")] = None
    """Resize images whose short side is larger to this one, and re-encode them; smaller ones are stored as they are."""
    format: Literal["jpeg", "webp", "png"] | None = None
    """Re-encode images of other forms to this one. Default: only resized images are re-encoded, as jpeg."""
    quality: Annotated[int | None, arg(metavar="1..100")] = None
    """Of re-encoded JPEG (with 4:2:0 chroma) and WebP. Default: 90."""
    shard_mb: Annotated[int, arg(metavar="N")] = 128
    """A tar file ends where the files that went into it reach so many MiB."""
    skip_corrupt: bool = False
    """Leave out images that cannot be read, or not decoded where they must be, and list them, instead of stopping."""
    jobs: Jobs = "auto"
    """Processes; auto: one a core."""

    def __post_init__(self) -> None:
        check_jobs(self.jobs)
        if self.shard_mb < 1:
            raise ConfigError(f"--shard-mb is a number of MiB, 1 or more; got {self.shard_mb}")


def main(words: Sequence[str]) -> int:
    command = parse(PackCommand, "data pack", words)
    from lockstep.data.packed.encode import Encoding

    encoding = Encoding(command.short_side, command.format, command.quality)
    from lockstep.cli.data.progress import progress
    from lockstep.data.packed import pack_writer

    plan = pack_writer.make_plan(command.folder, command.out, encoding, command.shard_mb << 20, command.skip_corrupt)
    with progress("packing", plan.samples, "images") as advance:
        manifest = pack_writer.write(plan, cores(command.jobs), advance)
    parts = manifest.splits.values()
    for path in (path for part in parts for path in part.left_out):
        print(f"left out: {printable_name(path)}")
    counts = " + ".join(f"{part.samples:,}" for part in parts)
    size = sum(shard.size_bytes for part in parts for shard in part.shards)
    files = sum(len(part.shards) for part in parts)
    print(f"{command.out}: {counts} images, {len(manifest.classes):,} classes, {files:,} files, {size / 1e6:,.1f} MB")
    return 0
