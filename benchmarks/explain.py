"""Does `lockstep explain` find what bounds a program, and does a change save what it predicts?

    python benchmarks/explain.py [NAME...|links|pairs]

Runs each slowed program of the table for some seconds, explains its records, runs the program with one proposed change,
and prints the predicted saving of the time per sample beside the measured one. Programs with a link run in two network
namespaces (needs root and iproute2). Half a minute each. `pairs`: two of each kind, and the sound ones. `links`: the
settings of `slow_link.py` over both links, as the time per image predicted from a recorded run without a change beside
the measured one; eight minutes.

Bar: the bottleneck is right, the change is proposed, and the measured saving is in the interval or within 25 % of the
predicted one; nothing is proposed for the sound programs. Of `links`: within 10 % in 16 of 18.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from limited_link import run_over_limited_link

from lockstep.report.sources import read_run
from lockstep.report.step_changes import possible_changes

SECONDS = 14.0
HOOKS = ("fp16", "bf16")
LOCKSTEP = [sys.executable, "-m", "lockstep"]


class Slowed(NamedTuple):
    """A program's flags, the right verdict, and the flags with the first change; "" for a sound program."""

    flags: str
    bound: str
    change: str = ""
    changed: str = ""
    megabits: float = 0.0
    in_pairs: bool = True


COMPUTING = "--width 512 --batch 1024 --layers 6"
PROGRAMS = {
    "slow storage": Slowed("--read 0.03", "data", "loader", "--read 0.03 --processes 3"),
    "slow storage, one process": Slowed("--read 0.05 --processes 1", "data", "loader", "--read 0.05 --processes 4"),
    "costly exchange, 300 Mbit/s": Slowed("--width 1200", "slow link", "accumulate", "--width 1200 --passes 4", 300),
    "exchange, 1 Gbit/s": Slowed(
        "--width 1600 --batch 64", "slow link", "accumulate", "--width 1600 --batch 64 --passes 4", 1000
    ),
    "ResNet-18, 1 Gbit/s": Slowed(
        "--resnet --batch 8", "computing", "accumulate", "--resnet --batch 8 --passes 4", 1000, False
    ),
    "16 bits impossible": Slowed(
        "--width 900 --hook bf16", "slow link", "accumulate", "--width 900 --hook bf16 --passes 4", 100, False
    ),
    "one thread": Slowed(f"{COMPUTING} --workers 1", "computing", "threads", f"{COMPUTING} --workers 1 --threads 2"),
    "one thread, wide": Slowed(
        "--width 2048 --batch 256 --workers 1",
        "computing",
        "threads",
        "--width 2048 --batch 256 --workers 1 --threads 2",
    ),
    "eight threads": Slowed(f"{COMPUTING} --threads 8", "threads", "threads", COMPUTING),
    "four threads, wide": Slowed(
        "--width 1024 --batch 512 --threads 4", "threads", "threads", "--width 1024 --batch 512"
    ),
    "one rank works more": Slowed("--width 256 --extra 0.03", "slow worker", "slow worker", "--width 256"),
    "one rank reads slowly": Slowed("--width 256 --read-on-1 0.04", "slow worker", "slow worker", "--width 256"),
    "tiny batch": Slowed(
        "--layers 40 --width 32 --batch 4", "small batch", "batch", "--layers 40 --width 32 --batch 16"
    ),
    "small batch": Slowed(
        "--layers 12 --width 64 --batch 8", "small batch", "batch", "--layers 12 --width 64 --batch 32"
    ),
    "sound, two workers": Slowed("--width 512 --batch 1024", "computing"),
    "sound, with a loader process": Slowed("--width 512 --batch 1024 --processes 1", "computing"),
    "sound, large": Slowed("--width 1024 --batch 1024", "computing"),
}
RESNET = "--resnet --batch 8 --steps 8"
LINKS = (100.0, 1000.0)
SETTINGS = {  # flags, and the change
    "ddp": ("", ""),
    "ddp, fp16": ("--hook fp16", "compress"),
    "ddp, bf16": ("--hook bf16", "compress"),
    "ddp, powersgd": ("--hook powersgd", "powersgd"),
    "ddp, 4 passes": ("--passes 4", "accumulate"),
    "horovod": ("--hvd", ""),
    "horovod, fp16": ("--hvd --hook fp16", "compress"),
    "horovod, bf16": ("--hvd --hook bf16", "compress"),
    "horovod, 4 passes": ("--hvd --passes 4", "accumulate"),
}


def measure(program: Slowed, flags: str, folder: Path) -> None:
    """Run a program with flags, and record its steps."""
    threads, workers = (re.search(rf"--{name} (\d+)", flags) for name in ("threads", "workers"))
    variables = {**os.environ, "OMP_NUM_THREADS": threads[1] if threads else "1"}
    options: dict[str, Any] = {"env": variables, "stdout": subprocess.DEVNULL}
    records, worker = ["--observe-dir", str(folder)], [__file__, "--worker", *flags.split()]
    if program.megabits:
        assert run_over_limited_link(program.megabits, worker, records, **options) == 0
    else:
        command = [*LOCKSTEP, "run", "-np", workers[1] if workers else "2", *records, "--", sys.executable, *worker]
        subprocess.run(command, check=True, **options)


def explained(folder: Path) -> dict[str, Any]:
    output = subprocess.run([*LOCKSTEP, "explain", "--json", str(folder)], check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(output.stdout)
    return found


def rate(folder: Path) -> float:
    """Return the median samples per second of a run's records."""
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    rates: list[float] = [record["images_per_second"] for record in records if record["kind"] == "step"]
    return median(rates)


def changed_flags(program: Slowed, verdict: dict[str, Any]) -> str:
    """Return the flags with the change; of loader processes, as many as are proposed."""
    actions = (change["action"] for change in verdict["changes"] if change["kind"] == program.change == "loader")
    processes = next((re.search(r"num_workers=(\d+)", action) for action in actions), None)
    return f"{program.flags} --processes {processes[1]}" if processes else program.changed


def check(name: str, program: Slowed) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        measure(program, program.flags, Path(scratch, "slow"))
        verdict = explained(Path(scratch, "slow"))
        kinds = [change["kind"] for change in verdict["changes"]] or [""]
        is_right = verdict["bound"] == program.bound and program.change in kinds
        print(f"{name}: {'right' if is_right else 'WRONG'}: {verdict['text']}")
        for change in verdict["changes"]:
            print(f"    {change['action']}: {change['gain']:.0%} ({change['low']:.0%} to {change['high']:.0%})")
        if program.changed:
            measure(program, changed_flags(program, verdict), Path(scratch, "changed"))
            saving = 1 - rate(Path(scratch, "slow")) / rate(Path(scratch, "changed"))
            predicted = next((each for each in verdict["changes"] if each["kind"] == program.change), None)
            said = (
                f"{predicted['gain']:.0%} ({predicted['low']:.0%} to {predicted['high']:.0%})" if predicted else "none"
            )
            print(f"  {program.change}: predicted {said}, measured {saving:.0%}", flush=True)


def check_links() -> None:
    """Print the time per image of each setting as a ratio to the unchanged one: predicted, and measured."""
    right = 0
    for megabits in LINKS:
        with tempfile.TemporaryDirectory() as scratch:
            base, predicted = 0.0, dict[str, float]()
            for number, (name, (flags, change)) in enumerate(SETTINGS.items()):
                folder = Path(scratch, str(number))
                measure(Slowed("", "", megabits=megabits), f"{RESNET} {flags}", folder)
                if not change:  # horovod is predicted to take as long as ddp
                    before, base = base, rate(folder)
                    run = read_run(folder / "metrics.jsonl", print)
                    assert run is not None
                    assert run.measured is not None
                    step = replace(run.measured, difference=0.0)
                    predicted = {each.kind: 1 - each.gain for each in possible_changes(step, None)}
                    expected, measured = 1.0, before / base if before else base * step.seconds / (2 * 8)
                else:
                    expected, measured = predicted[change], base / rate(folder)
                is_right = abs(expected / measured - 1) <= 0.1
                right += is_right
                print(f"{megabits:g} Mbit/s, {name}: predicted {expected:.3f}, measured {measured:.3f}", flush=True)
    print(f"{right} of {len(LINKS) * len(SETTINGS)} within 10 %")


def work(arguments: list[str]) -> None:
    """Train as a slowed program does."""
    import torch
    from torch import distributed, nn
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, Dataset

    from lockstep import hvd
    from lockstep.hvd.compression import FP16Compressor
    from lockstep.models import registry
    from lockstep.observe.outside_changes import apply

    parser = argparse.ArgumentParser()
    for name, default in (
        ("width", 128),
        ("layers", 3),
        ("batch", 32),
        ("processes", 0),
        ("passes", 1),
        ("steps", 64),
        *(("threads", 0), ("workers", 0)),  # for the launcher
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name in ("read", "read-on-1", "extra"):
        parser.add_argument(f"--{name}", type=float, default=0.0, help="seconds per batch")
    parser.add_argument("--hook", default="", help="fp16, bf16 or powersgd")
    parser.add_argument("--hvd", action="store_true", help="Horovod's optimizer instead of DistributedDataParallel")
    parser.add_argument("--resnet", action="store_true", help="Lockstep's ResNet-18, as in slow_link.py")
    flags = parser.parse_args(arguments)
    torch.manual_seed(0)
    if flags.hvd:
        hvd.init()
    else:
        distributed.init_process_group("gloo")
    rank = hvd.rank() if flags.hvd else distributed.get_rank()
    seconds = flags.read + (flags.read_on_1 if rank == 1 else 0.0)

    class BF16(FP16Compressor):
        @staticmethod
        def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype]:
            return tensor.bfloat16(), tensor.dtype

    class Samples(Dataset[Any]):
        def __len__(self) -> int:
            return 10_000_000

        def __getitem__(self, index: int) -> torch.Tensor:
            if index % flags.batch == 0 and seconds:
                time.sleep(seconds)
            return SAMPLE

    SAMPLE = torch.randn(3, 32, 32) if flags.resnet else torch.randn(flags.width)
    layers = [each for _ in range(flags.layers) for each in (nn.Linear(flags.width, flags.width), nn.ReLU())]
    network = registry.build("resnet18", num_classes=10, in_channels=3, side=32) if flags.resnet else None
    model: Any = network or nn.Sequential(*layers)
    if flags.hook == "powersgd":
        apply("powersgd")
    if not flags.hvd:
        model = DistributedDataParallel(model)
    if flags.hook in HOOKS and not flags.hvd:
        model.register_comm_hook(None, getattr(default_hooks, f"{flags.hook}_compress_hook"))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-9, momentum=0.9)
    if flags.hvd:
        compression = BF16 if flags.hook == "bf16" else getattr(hvd.Compression, flags.hook or "none")
        named = model.named_parameters()
        optimizer = hvd.DistributedOptimizer(optimizer, named, compression, backward_passes_per_step=flags.passes)
    start, passes = time.monotonic(), 0
    end = torch.zeros(1)
    for batch in DataLoader(Samples(), flags.batch, num_workers=flags.processes, collate_fn=torch.stack):
        passes += 1
        if passes % flags.passes:
            with nullcontext() if flags.hvd else model.no_sync():
                model(batch).square().mean().backward()
            continue
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and flags.extra:
            time.sleep(flags.extra)
        if passes // flags.passes % min(flags.steps, 16) == 0:
            end[0] = time.monotonic() - start > SECONDS and passes // flags.passes >= flags.steps
            hvd.broadcast_(end, 0) if flags.hvd else distributed.broadcast(end, 0)
            if end:
                break


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        work(sys.argv[2:])
    else:
        parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("names", nargs="*", default=list(PROGRAMS))
        pairs = [name for name, program in PROGRAMS.items() if program.in_pairs]
        for chosen in parser.parse_args().names:
            if chosen == "links":
                check_links()
            for name in pairs if chosen == "pairs" else [chosen] if chosen in PROGRAMS else []:
                check(name, PROGRAMS[name])
