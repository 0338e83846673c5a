"""Does `lockstep explain` find what bounds a program, and does a change save what it predicts?

    python benchmarks/explain.py [NAME...]

Runs each slowed program of the table on two workers for some seconds, explains its records, runs the program with one
proposed change, and prints the predicted saving of the time per sample beside the measured one. Programs with a link
run in two network namespaces (needs root and iproute2). Half a minute each.

Bar: the bottleneck is right, the change is proposed, and the measured saving is in the interval; nothing is proposed
for the sound programs.
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
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from limited_link import run_over_limited_link

SECONDS = 14.0
LOCKSTEP = [sys.executable, "-m", "lockstep"]


class Slowed(NamedTuple):
    """A program's flags, the right verdict, and the flags with the first change; "" for a sound program."""

    flags: str
    bound: str
    change: str = ""
    changed: str = ""
    megabits: float = 0.0


PROGRAMS = {
    "slow storage": Slowed("--read 0.03", "data", "loader", "--read 0.03 --processes 3"),
    "slow storage, one process": Slowed("--read 0.05 --processes 1", "data", "loader", "--read 0.05 --processes 4"),
    "costly exchange, 300 Mbit/s": Slowed("--width 1200", "slow link", "batch", "--width 1200 --passes 4", 300),
    "exchange, 1 Gbit/s": Slowed(
        "--width 1600 --batch 64", "slow link", "batch", "--width 1600 --batch 64 --passes 4", 1000
    ),
    "ResNet-18, 1 Gbit/s": Slowed("--resnet --batch 8", "computing", "batch", "--resnet --batch 8 --passes 4", 1000),
    "16 bits impossible": Slowed(
        "--width 900 --hook bf16", "slow link", "batch", "--width 900 --hook bf16 --passes 4", 100
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


def measure(program: Slowed, flags: str, folder: Path) -> None:
    """Run a program with flags on two workers, and record its steps."""
    options: dict[str, Any] = {"env": {**os.environ, "OMP_NUM_THREADS": "1"}, "stdout": subprocess.DEVNULL}
    records, worker = ["--observe-dir", str(folder)], [__file__, "--worker", *flags.split()]
    if program.megabits:
        assert run_over_limited_link(program.megabits, worker, records, **options) == 0
    else:
        command = [*LOCKSTEP, "run", "-np", "2", *records, "--", sys.executable, *worker]
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


def work(arguments: list[str]) -> None:
    """Train as a slowed program does."""
    import torch
    from torch import distributed, nn
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, Dataset

    from lockstep.models import registry

    parser = argparse.ArgumentParser()
    for name, default in (("width", 128), ("layers", 3), ("batch", 32), ("processes", 0), ("passes", 1), ("steps", 64)):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name in ("read", "read-on-1", "extra"):
        parser.add_argument(f"--{name}", type=float, default=0.0, help="seconds per batch")
    parser.add_argument("--hook", default="")
    parser.add_argument("--resnet", action="store_true", help="Lockstep's ResNet-18, as in slow_link.py")
    flags = parser.parse_args(arguments)
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    seconds = flags.read + (flags.read_on_1 if rank == 1 else 0.0)

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
    model = DistributedDataParallel(network or nn.Sequential(*layers))
    if flags.hook == "bf16":
        model.register_comm_hook(None, default_hooks.bf16_compress_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9, momentum=0.9)
    start, passes = time.monotonic(), 0
    end = torch.zeros(1)
    for batch in DataLoader(Samples(), flags.batch, num_workers=flags.processes, collate_fn=torch.stack):
        passes += 1
        if passes % flags.passes:
            with model.no_sync():
                model(batch).square().mean().backward()
            continue
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and flags.extra:
            time.sleep(flags.extra)
        if passes // flags.passes % 16 == 0:
            end[0] = time.monotonic() - start > SECONDS and passes // flags.passes >= flags.steps
            distributed.broadcast(end, 0)
            if end:
                break


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        work(sys.argv[2:])
    else:
        parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("names", nargs="*", default=list(PROGRAMS))
        for chosen in parser.parse_args().names:
            check(chosen, PROGRAMS[chosen])
