"""How do Lockstep and other training tools compare when they train one network on one folder of photographs?

    python benchmarks/peers_table.py FOLDER --timm CHECKOUT --references CHECKOUT [--rounds 7] [--workers 1 2]
    python benchmarks/peers_table.py --page docs/explanation/performance.md     # write the table of the newest records

FOLDER has photographs as train/CLASS/*.jpg and val/CLASS/*.jpg. --timm takes a git checkout of
huggingface/pytorch-image-models, whose train.py runs with the timm of the checkout; --references takes one of
pytorch/vision, whose references/classification/train.py runs with the torchvision of the environment. Without a
checkout, that tool is left out. Neither script can train with several workers on CPUs: timm passes its device to
DistributedDataParallel, which rejects a CPU there, and torchvision's references select a CUDA device. So both have
rows for one worker only.

All train a ResNet-18 (torchvision's, or timm's, which has the same layers) from random weights for one epoch on random
crops of at least 8 % of the area, resized to 224 x 224, flipped and normalized: batches of 8 per worker, SGD with
momentum 0.9, weight decay 1e-4 and a constant learning rate, in float32 and the contiguous memory layout. Each worker
has one loader process, and all workers of a job share the cores as equal numbers of threads. Every step prints its
loss; the epoch ends with an evaluation of one image per class and a checkpoint. What the tools do besides is their
default:

- `lockstep train` records metrics, I/O counters and TensorBoard, and compares the workers' weights.
- The hand-written loops, with DistributedDataParallel, Accelerate and Fabric, share peers/folder_job.py. They are
  started with torchrun if there are several workers.
- timm normalizes in the training process; its color jitter, label smoothing and warm-up are switched off.
- torchvision's references compute top-1 and top-5 for each batch.

Each turn is one command, from outside (watched.py). Its figures are the images per second of the timed steps, between
the first ones and those that use up the last loaded batches; the seconds from the start of the command to the line of
the first step; and the peak memory of all processes. The lines of code are those that a user writes for this job,
imports included, without blank lines, comments and docstrings; a command has none, and its flags are counted instead.
About 16 minutes on two cores.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from code_lines import code_lines
from environments import PEERS, add_version, python_with, torchrun
from harness import FOLDER, append_record, existing_folder, rounds
from readings import Reading, compare_readings
from watched import Steps, watch

from lockstep.files.jsonl import read_records
from lockstep.world.devices import usable_cores

LOCKSTEP, TIMM, REFERENCES = "lockstep train", "timm", "torchvision's references"
UNITS = {"rate": "images/s", "first step": "seconds", "memory": "MB"}
BEFORE, AFTER = 3, 3  # steps that are not timed; a loader process prepares 2 batches in advance
LR, WEIGHT_DECAY = "0.01", "1e-4"
STEP_LINES = {LOCKSTEP: r"^epoch 1/1 +step +\d", TIMM: r"Train: 0 \[", REFERENCES: r"^Epoch: \[0\] +\["}
LOOP_LINE = r"^epoch 1 step \d"
SCRIPTS = {"DDP loop": "folder_ddp.py", "Accelerate": "folder_accelerate.py", "Fabric": "folder_fabric.py"}
MEGABYTE = 1e6


@dataclass(frozen=True)
class Job:
    """The job that all tools run: `steps` batches of `batch` images of side x side pixels per worker."""

    folder: Path
    classes: int
    side: int
    batch: int
    timed_steps: int
    workers: int

    def steps(self, line: str) -> Steps:
        return Steps(re.compile(line), BEFORE, self.timed_steps, AFTER)


@dataclass(frozen=True)
class Tool:
    """The command before the flags, and the flags; only the flags that describe the job are counted."""

    start: list[str]
    flags: list[str]
    step_line: str
    code: tuple[Path, ...] = ()


def tools(job: Job, timm: Path | None, references: Path | None) -> dict[str, Tool]:
    """Return the tools that can run the job; Lockstep first."""
    found = {LOCKSTEP: lockstep(job), **loops(job)}
    if timm and job.workers == 1:
        found[TIMM] = timm_script(job, timm)
    if references and job.workers == 1:
        found[REFERENCES] = references_script(job, references)
    return found


def lockstep(job: Job) -> Tool:
    flags = ["-a", "torchvision/resnet18", "-np", str(job.workers), "--device", "cpu", "-b", str(job.batch), "-j", "1"]
    flags += ["--epochs", "1", "--image-size", str(job.side), "--lr", LR, "--lr-scaling", "none", "--no-nesterov"]
    flags += ["--weight-decay", WEIGHT_DECAY, "--schedule", "constant", "--warmup-epochs", "0"]
    flags += ["--label-smoothing", "0", "--log-every", "1"]
    start = [sys.executable, "-m", "lockstep", "train", str(job.folder)]
    return Tool(start, flags, STEP_LINES[LOCKSTEP])


def loops(job: Job) -> dict[str, Tool]:
    flags = ["--side", str(job.side), "--batch", str(job.batch), "--loaders", "1", "--epochs", "1"]
    flags += ["--lr", LR, "--log-every", "1"]
    folder = FOLDER / "peers"
    found = {}
    for name, packages in PEERS.items():
        python, script = python_with(*packages), folder / SCRIPTS[name]
        start = [*(torchrun(python, job.workers) if job.workers > 1 else [python]), str(script), str(job.folder)]
        found[name] = Tool(start, flags, LOOP_LINE, (script, folder / "folder_job.py"))
    return found


def timm_script(job: Job, checkout: Path) -> Tool:
    flags = ["--train-split", "train", "--val-split", "val", "--model", "resnet18", "--num-classes", str(job.classes)]
    flags += ["--device", "cpu", "-b", str(job.batch), "-j", "1", "--epochs", "1"]
    flags += ["--input-size", "3", str(job.side), str(job.side), "--train-interpolation", "bilinear"]
    flags += ["--opt", "momentum", "--lr", LR, "--weight-decay", WEIGHT_DECAY, "--sched", "step"]
    flags += ["--warmup-epochs", "0", "--smoothing", "0", "--color-jitter", "0", "--log-interval", "1"]
    start = [python_with("timm"), str(checkout / "train.py"), "--data-dir", str(job.folder)]
    add_version(TIMM, checkout)  # replaces the environment's timm, which only provides its dependencies
    return Tool(start, flags, STEP_LINES[TIMM])


def references_script(job: Job, checkout: Path) -> Tool:
    flags = ["--model", "resnet18", "--device", "cpu", "-b", str(job.batch), "-j", "1", "--epochs", "1"]
    flags += ["--train-crop-size", str(job.side), "--val-crop-size", str(job.side)]
    flags += ["--val-resize-size", str(job.side * 256 // 224), "--lr", LR, "--weight-decay", WEIGHT_DECAY]
    flags += ["--print-freq", "1"]
    script = checkout / "references" / "classification" / "train.py"
    add_version(REFERENCES, checkout)
    return Tool([python_with(), str(script), "--data-path", str(job.folder)], flags, STEP_LINES[REFERENCES])


def reading(job: Job, tool: Tool) -> Reading:
    """Return a reading that runs the tool's command once in a temporary folder."""
    threads = max(1, usable_cores() // job.workers)
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # so that processes can use cached bytecode

    def turn() -> dict[str, float]:
        with TemporaryDirectory() as folder:
            watched = watch([*tool.start, *tool.flags], job.steps(tool.step_line), Path(folder), environment)
        images = job.timed_steps * job.batch * job.workers
        figures = (images / watched.timed_seconds, watched.first_step_seconds, watched.peak_bytes / MEGABYTE)
        return dict(zip(UNITS, figures, strict=True))

    return turn


def repeat_images(source: Path, folder: Path, count: int) -> int:
    """Link `count` training images, repeated in turns, and one validation image per class; return the classes.

    Raises:
        SystemExit: A class has no images, or there are more classes than images.
    """
    for split in ("train", "val"):
        classes = sorted(path for path in (source / split).glob("*") if path.is_dir())
        images = [sorted(path for path in one.iterdir() if path.is_file()) for one in classes]
        if not classes or not all(images):
            raise SystemExit(f"{source / split}: expected a folder with images for each class")
        if count < len(classes):
            raise SystemExit(f"{len(classes)} classes but only {count} images; increase --steps or --batch")
        for number in range(count if split == "train" else len(classes)):
            one = images[number % len(classes)]
            image = one[number // len(classes) % len(one)]
            link = folder / split / classes[number % len(classes)].name / f"{number:06d}-{image.name}"
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(image.resolve())
    return len(classes)


def title(side: int, workers: int) -> str:
    return f"peers_table: ResNet-18 at {side}, {workers} worker{'s' * (workers > 1)}"


def measure(given: argparse.Namespace) -> None:
    for workers in given.workers:
        with TemporaryDirectory() as folder:
            count = (BEFORE + given.steps + AFTER) * given.batch * workers
            classes = repeat_images(given.folder, Path(folder), count)
            job = Job(Path(folder), classes, given.side, given.batch, given.steps, workers)
            found = tools(job, given.timm, given.references)
            turns = {name: reading(job, tool) for name, tool in found.items()}
            compare_readings(title(given.side, workers), turns, {}, UNITS, given.rounds, warm_up=0)
            code = {
                name: {"lines": code_lines(*tool.code), "flags": sum(flag.startswith("-") for flag in tool.flags)}
                for name, tool in found.items()
            }
            append_record({"name": f"{title(given.side, workers)}, code", "tools": code})


def newest_records() -> dict[str, Mapping[str, Any]]:
    """Return the newest record of each name.

    Raises:
        SystemExit: There are none yet.
    """
    path = FOLDER / "records" / "peers_table.jsonl"
    if not path.exists():
        raise SystemExit(f"{path}: no records yet; run this benchmark with a folder of photographs")
    return {record["name"]: record for record in read_records(path)}


def rows(side: int) -> Iterator[str]:
    """Yield the lines of the table of the newest records, as Markdown."""
    records = newest_records()
    yield "| tool | workers | images/s | to the first step, s | peak memory, MB | lines of code |"
    yield "|---|---|---|---|---|---|"
    for workers in (1, 2):
        name = title(side, workers)
        if f"{name}, code" not in records:
            continue
        for tool, code in records[f"{name}, code"]["tools"].items():
            cells = [spread(records[f"{name}, {figure}"]["contestants"][tool]["figure"]) for figure in UNITS]
            lines = str(code["lines"]) if code["lines"] else f"a command with {code['flags']} flags"
            yield f"| {tool} | {workers} | {' | '.join(cells)} | {lines} |"


def write_table(page: Path, side: int) -> None:
    """Replace the table in a page that has the same header.

    Raises:
        SystemExit: The page does not have such a table.
    """
    lines = page.read_text().split("\n")
    table = list(rows(side))
    if table[0] not in lines:
        raise SystemExit(f"{page}: expected a table that starts with {table[0]}")
    start = end = lines.index(table[0])
    while lines[end].startswith("|"):
        end += 1
    page.write_text("\n".join([*lines[:start], *table, *lines[end:]]))


def spread(quartiles: list[float]) -> str:
    digits = 0 if quartiles[1] >= 100 else 1
    low, median, high = (f"{figure:,.{digits}f}" for figure in quartiles)
    return f"{median} ({low} to {high})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=existing_folder, nargs="?")
    parser.add_argument("--timm", type=existing_folder, metavar="CHECKOUT")
    parser.add_argument("--references", type=existing_folder, metavar="CHECKOUT")
    parser.add_argument("--workers", type=int, nargs="+", choices=(1, 2), default=[1, 2])
    parser.add_argument("--rounds", type=rounds, default=7)
    parser.add_argument("--side", type=int, default=224, help="side of the crops in pixels")
    parser.add_argument("--batch", type=int, default=8, help="images per worker and step")
    parser.add_argument("--steps", type=int, default=8, help="timed steps")
    parser.add_argument("--page", type=Path, help="only write the table of the newest records to this page")
    given = parser.parse_args()
    if given.page:
        if not given.page.is_file():
            parser.error(f"--page {given.page}: no such file")
        write_table(given.page, given.side)
        return
    if given.folder is None:
        parser.error("FOLDER is missing; pass a folder with train/CLASS/*.jpg and val/CLASS/*.jpg")
    if min(given.side, given.batch, given.steps) < 1:
        parser.error("--side, --batch and --steps must be at least 1")
    for name, checkout, script in (
        (TIMM, given.timm, "train.py"),
        (REFERENCES, given.references, "references/classification/train.py"),
    ):
        if checkout is None:
            print(f"{name}: left out, because no checkout was given", file=sys.stderr)
        elif not (checkout / script).is_file():
            parser.error(f"{checkout}: not a checkout with {script}")
    given.folder, given.timm, given.references = (
        path and path.resolve() for path in (given.folder, given.timm, given.references)
    )
    measure(given)
    print("\n" + "\n".join(rows(given.side)))


if __name__ == "__main__":
    main()
