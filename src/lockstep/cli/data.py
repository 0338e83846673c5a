"""`lockstep data`: download, pack, describe, check and extract data sets."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from lockstep.cli import USAGE_ERROR, action_of
from lockstep.cli.parse import parse
from lockstep.config.flags import Positional, arg
from lockstep.config.schema import DataConfig
from lockstep.data import catalog
from lockstep.errors import INTERRUPTED, DataError, require
from lockstep.files.untrusted import printable_name

if TYPE_CHECKING:
    from lockstep.data.inspection import SetFacts, SplitFacts

ACTIONS = {
    "get": "download a data set before a job needs it",
    "pack": "pack a folder of images into a few large files",
    "verify": "describe a folder of images or a pack, and find damaged images",
    "prepare": "extract ImageNet's official archives",
}
Jobs = Annotated[int | Literal["auto"], arg(aliases=["-j"], metavar="N|auto")]
LINE_SECONDS = 10  # between two lines of progress where there is no terminal


def main(arguments: Sequence[str]) -> int:
    action = action_of(arguments, "data", "action", "Actions", "", ACTIONS)
    if action is None:
        return 0 if arguments else USAGE_ERROR
    try:
        return _MAINS[action](arguments[1:])
    except KeyboardInterrupt:
        print(f"lockstep data {action}: interrupted; completed work is kept where possible", file=sys.stderr)
        return INTERRUPTED


@dataclass(frozen=True)
class GetCommand:
    """Download a data set, for jobs on nodes without internet access."""

    name: Annotated[Positional[str], arg(metavar="NAME")]
    """Data set (see `lockstep datasets`)."""
    data_dir: Path = Path("data")
    """Folder for downloaded data sets, as in `lockstep train`."""


def _get(arguments: Sequence[str]) -> int:
    command = parse(GetCommand, "data get", arguments)
    fetched = [name for name, entry in catalog.NAMED.items() if entry.fetched]
    if command.name not in fetched:
        near = get_close_matches(command.name, fetched, n=1)
        hint = f"did you mean {near[0]}?" if near else f"must be one of {', '.join(fetched)}"
        raise DataError(f"{command.name!r} cannot be downloaded; {hint}")
    data = catalog.load(DataConfig(dataset=command.name, data_dir=command.data_dir), download=True)
    print(f"{command.name} is in {command.data_dir}: {len(data.train):,} + {len(data.val):,} images")
    return 0


@dataclass(frozen=True)
class PackCommand:
    """Pack a folder of images into WebDataset tar files, for `lockstep train OUT`.

    Without --short-side, files are stored unchanged.
    """

    folder: Annotated[Positional[Path], arg(metavar="FOLDER")]
    """Folder with train/CLASS/... and val/CLASS/... (or test)."""
    out: Annotated[Positional[Path], arg(metavar="OUT")]
    """Folder to create."""
    short_side: Annotated[int | None, arg(metavar="PIXELS")] = None
    """Shrink larger images to this short side, and store them as JPEG."""
    bits: Annotated[int | None, arg(metavar="N")] = None
    """Bits used in 16-bit gray images, such as 12, also in training."""
    shard_mb: Annotated[int, arg(metavar="N")] = 128
    """Size of each tar file, in MiB."""
    skip_corrupt: bool = False
    """Skip and list images that cannot be read, instead of failing."""
    jobs: Jobs = "auto"
    """Number of processes; auto: one per core."""

    def __post_init__(self) -> None:
        _check_jobs(self.jobs)
        require(self.shard_mb >= 1, "--shard-mb", self.shard_mb, "at least 1")


def _pack(arguments: Sequence[str]) -> int:
    command = parse(PackCommand, "data pack", arguments)
    from lockstep.data import pack_writer

    encoding = pack_writer.Encoding(command.short_side, command.bits)
    plan = pack_writer.make_plan(command.folder, command.out, encoding, command.shard_mb << 20, command.skip_corrupt)
    with _progress("packing", plan.samples, "images") as advance:
        manifest = pack_writer.write(plan, _cores(command.jobs), advance)
    _print_notes(plan.notes)
    parts = manifest.splits.values()
    for path in (path for part in parts for path in part.left_out):
        print(f"skipped: {printable_name(path)}")
    counts = " + ".join(f"{part.samples:,}" for part in parts)
    size = sum(shard.size_bytes for part in parts for shard in part.shards)
    files = sum(len(part.shards) for part in parts)
    classes = f"{len(manifest.classes):,} classes"
    print(f"{command.out}: {counts} images, {classes}, {files:,} files, {size / 1e6:,.1f} MB")
    return 0


def _print_facts(path: Path, facts: SetFacts) -> None:
    table = Table("", *(split.name for split in facts.splits), show_edge=False)
    columns = [_rows(split) for split in facts.splits]
    for row in columns[0]:
        table.add_row(row, *(column[row] for column in columns))
    console = Console(highlight=False)
    console.print(printable_name(f"{path}: {_described(facts)}"), markup=False, soft_wrap=True)
    console.print(table)
    _print_notes(facts.notes)


def _described(facts: SetFacts) -> str:
    classes = f"{len(facts.classes):,} classes: {', '.join(facts.classes[:6])}" + ", ..." * (len(facts.classes) > 6)
    if facts.manifest is None:
        return f"a folder of images, {classes}"
    side = facts.manifest.settings.get("short_side")
    resized = f", short sides at most {side}" if side else ""
    return f"a pack of {facts.manifest.name}{resized}, {classes}"


def _rows(split: SplitFacts) -> dict[str, str]:
    rows = {
        "images": f"{split.samples:,}",
        "images per class": " to ".join(f"{count:,}" for count in dict.fromkeys(split.class_sizes)),
        "MB": f"{split.size_bytes / 1e6:,.1f}",
        "KB per image": f"{split.size_bytes / split.samples / 1e3:,.1f}",
        "tar files": f"{split.shards:,}",
        "inspected": f"{split.looked_at:,}" + f", {split.unreadable:,} unreadable" * (split.unreadable > 0),
        "formats": ", ".join(f"{form} {count:,}" for form, count in split.forms.most_common()),
        "short side": _spread(split.short_sides),
        "long side": _spread(split.long_sides),
    }
    return rows if split.shards else {name: cell for name, cell in rows.items() if name != "tar files"}


def _spread(sides: tuple[int, int, int]) -> str:
    smallest, median, largest = sides
    return f"{smallest} to {largest}, median {median}" if smallest < largest else f"{smallest}"


@dataclass(frozen=True)
class VerifyCommand:
    """Describe a folder of images or a pack, and find damaged images.

    Prints classes, images, bytes, formats and sizes, then checks a pack's checksums or decodes every image of a folder.
    """

    path: Annotated[Positional[Path], arg(metavar="PATH")]
    """Folder with train/ and val/ (or test/), or a pack."""
    jobs: Jobs = "auto"
    """Number of processes; auto: one per core."""

    def __post_init__(self) -> None:
        _check_jobs(self.jobs)


def _verify(arguments: Sequence[str]) -> int:
    command = parse(VerifyCommand, "data verify", arguments)
    from lockstep.data import inspection

    plan = inspection.plan(command.path)
    with suppress(DataError):  # a damaged pack is listed below
        _print_facts(command.path, inspection.describe(command.path))
    with _progress("verifying", plan.samples, "images") as advance:
        bad = inspection.run(plan, _cores(command.jobs), advance)
    for line in bad:
        print(printable_name(line))
    if bad:
        raise DataError(f"{command.path}: {len(bad):,} damaged, listed above; copy or pack them again, or remove them")
    print(f"{command.path}: none of {plan.samples:,} images is damaged")
    return 0


@dataclass(frozen=True)
class PrepareCommand:
    """Extract ImageNet's official archives (ILSVRC2012) into DEST/train/CLASS and DEST/val/CLASS.

    To resume, run the same command again; complete folders are compared by names and sizes.
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


def _prepare(arguments: Sequence[str]) -> int:
    command = parse(PrepareCommand, "data prepare", arguments)
    from lockstep.data.sources import prepare_imagenet

    archives = prepare_imagenet.look(command.train, command.val, command.devkit)
    with _progress("preparing", command.train.stat().st_size + command.val.stat().st_size, "bytes") as advance:
        train, val = prepare_imagenet.prepare(archives, command.dest, advance)
    print(
        f"{command.dest}: {train:,} + {val:,} images, {len(archives.classes):,} classes; lockstep train {command.dest}"
    )
    return 0


_MAINS = {"get": _get, "pack": _pack, "verify": _verify, "prepare": _prepare}


def _print_notes(notes: Sequence[str]) -> None:
    for note in notes:
        print(f"note: {note}")


def _check_jobs(jobs: int | Literal["auto"]) -> None:
    require(jobs == "auto" or jobs >= 1, "--jobs", jobs, "at least 1, or auto")


def _cores(jobs: int | Literal["auto"]) -> int:
    from lockstep.world.devices import usable_cores

    return usable_cores() if jobs == "auto" else jobs


@contextmanager
def _progress(doing: str, total: int, unit: str) -> Iterator[Callable[[int], None]]:
    """Yield a function to call with the number of items completed; the unit "bytes" is shown as MB or GB."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _Lines(doing, total, unit).advance
        return
    counts = DownloadColumn() if unit == "bytes" else MofNCompleteColumn()
    with Progress(TextColumn(doing), BarColumn(), counts, TimeRemainingColumn(), console=console) as bar:
        task = bar.add_task(doing, total=total)
        yield lambda count: bar.advance(task, count)


class _Lines:
    def __init__(self, doing: str, total: int, unit: str):
        self._doing, self._total, self._unit = doing, total, unit
        self._done, self._printed_at = 0, time.monotonic()

    def advance(self, count: int) -> None:
        self._done += count
        if time.monotonic() - self._printed_at >= LINE_SECONDS:
            self._printed_at = time.monotonic()
            share = 100 * self._done / max(1, self._total)
            line = f"{self._doing}: {self._done:,} of {self._total:,} {self._unit} ({share:.0f} %)"
            print(line, file=sys.stderr, flush=True)
