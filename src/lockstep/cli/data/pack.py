"""`lockstep data pack`: pack a folder of images into a few large files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from lockstep.cli.data.processes_flag import Jobs, check_jobs, cores
from lockstep.cli.parse import parse
from lockstep.config.flags import Positional, arg
from lockstep.errors import require
from lockstep.files.untrusted import printable_name


@dataclass(frozen=True)
class PackCommand:
    """Pack a folder of images into WebDataset tar files, for `lockstep train OUT`.

    To resume, run the same command again. Without --short-side and --format, files are stored unchanged.
    """

    folder: Annotated[Positional[Path], arg(metavar="FOLDER")]
    """Folder with train/CLASS/... and val/CLASS/... (or test)."""
    out: Annotated[Positional[Path], arg(metavar="OUT")]
    """Folder to create."""
    short_side: Annotated[int | None, arg(metavar="PIXELS")] = None
    """Shrink larger images to this short side and re-encode them."""
    format: Literal["jpeg", "webp", "png"] | None = None
    """Re-encode other formats to this one. Default: jpeg, for resized images only."""
    quality: Annotated[int | None, arg(metavar="1..100")] = None
    """Quality of re-encoded JPEG and WebP. Default: 90."""
    shard_mb: Annotated[int, arg(metavar="N")] = 128
    """Size of each tar file, in MiB."""
    skip_corrupt: bool = False
    """Skip and list images that cannot be read, instead of failing."""
    jobs: Jobs = "auto"
    """Number of processes; auto: one per core."""

    def __post_init__(self) -> None:
        check_jobs(self.jobs)
        require(self.shard_mb >= 1, "--shard-mb", self.shard_mb, "at least 1")


def main(arguments: Sequence[str]) -> int:
    command = parse(PackCommand, "data pack", arguments)
    from lockstep.data.packed.encode import Encoding

    encoding = Encoding(command.short_side, command.format, command.quality)
    from lockstep.cli.data.progress import progress
    from lockstep.data.packed import pack_writer

    plan = pack_writer.make_plan(command.folder, command.out, encoding, command.shard_mb << 20, command.skip_corrupt)
    with progress("packing", plan.samples, "images") as advance:
        manifest = pack_writer.write(plan, cores(command.jobs), advance)
    parts = manifest.splits.values()
    for path in (path for part in parts for path in part.left_out):
        print(f"skipped: {printable_name(path)}")
    counts = " + ".join(f"{part.samples:,}" for part in parts)
    size = sum(shard.size_bytes for part in parts for shard in part.shards)
    files = sum(len(part.shards) for part in parts)
    print(f"{command.out}: {counts} images, {len(manifest.classes):,} classes, {files:,} files, {size / 1e6:,.1f} MB")
    return 0
