"""What is fuzzed: each parser of what others may have written, with a valid input that the real writer made.

A target's `read` takes the hostile bytes and may raise `allowed` alone.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import hashlib
import io
import json
import re
import shutil
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import redirect_stderr, suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from mutations import MARKER, hostile_bytes, hostile_json
from PIL import Image
from torch import nn

from lockstep import errors

SUPPORT = Path(__file__).resolve().parents[2] / "support"
sys.path.append(str(SUPPORT))
GIB = 1 << 30


@dataclass
class Target:
    """A parser.

    Args:
        seed: A valid input.
        as_json: Whether values within it are changed, too.
        memory_bytes: By which the process may grow.
        seconds: The processor time for one input.
    """

    seed: bytes
    read: Callable[[bytes], object]
    allowed: tuple[type[BaseException], ...] = ()
    as_json: bool = False
    memory_bytes: int = GIB
    seconds: float = 5.0

    def input(self, number: int) -> bytes:
        """The hostile input of this number."""
        return (hostile_json if self.as_json else hostile_bytes)(Random(number), self.seed)


Make = Callable[[Path], Target]
TARGETS: dict[str, Make] = {}


def target(make: Make) -> Make:
    TARGETS[make.__name__.replace("_", "-")] = make
    return make


def _lines(records: list[Any]) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def _image(form: str, **options: Any) -> bytes:
    y, x = np.mgrid[0:48, 0:64]
    pixels = np.stack([x * 3, y * 4, (x + y) * 2], 2).astype(np.uint8)
    stored = io.BytesIO()
    Image.fromarray(pixels).save(stored, form, **options)
    return stored.getvalue()


# Values and configurations


@target
def yaml(folder: Path) -> Target:
    from lockstep.files.untrusted import parse_yaml

    return Target(
        b"a: &a {x: 1, y: [1, 2.5, '3']}\nb: {<<: *a, d: 2020-01-01}\nc: !!binary aGk=\n", parse_yaml, (ValueError,)
    )


@target
def json_value(folder: Path) -> Target:
    from lockstep.files.untrusted import parse_json

    return Target(b'{"a": [1, 2.5, "x", null, true], "b": {"c": "d"}}', parse_json, (ValueError,), as_json=True)


def _config() -> dict[str, Any]:
    from lockstep.config import recipes
    from lockstep.config.mapping import to_mapping

    return to_mapping(recipes.load("cifar10"))


@target
def recipe_yaml(folder: Path) -> Target:
    import yaml

    from lockstep.config import recipes

    return Target(
        yaml.safe_dump(_config()).encode(),
        _of_file(folder / "r.yaml", lambda path: recipes.load(str(path))),
        (errors.ConfigError,),
    )


@target
def recipe_values(folder: Path) -> Target:
    from lockstep.config import recipes

    seed = json.dumps({**_config(), "for_arch": {"resnet50": {"optim": {"lr": 0.1}}}}).encode()  # JSON is YAML
    put = _of_file(folder / "v.yaml", lambda path: recipes.load(str(path)))

    def read(data: bytes) -> object:  # YAML has forms of numbers that JSON lacks
        return put(re.sub(rb'"(0x[0-9a-f]+|1(?::00)+)"', rb"\1", data))

    return Target(seed, read, (errors.ConfigError,), as_json=True)


@target
def horovod_config(folder: Path) -> Target:
    from lockstep.cli.horovodrun import arguments_of_file

    seed = (
        b'{"verbose": true, "params": {"fusion_threshold_mb": 32, "cache-capacity": 9}, "stall_check": {"enabled": 0}}'
    )
    return Target(seed, _of_file(folder / "h.yaml", arguments_of_file), (errors.ConfigError,), as_json=True)


def _of_file(path: Path, read: Callable[[Path], object]) -> Callable[[bytes], object]:
    def put(data: bytes) -> object:
        path.write_bytes(data)
        return read(path)

    return put


# Checkpoints and weights

ABOUT = {
    "arch": "digits-net",
    "classes": ["zero", "one"],
    "input": {"channels": 1, "height": 8, "width": 8, "mean": [0.5], "std": [0.5], "crop_ratio": 1.0},
    "data": "digits",
}


def _checkpoint(folder: Path) -> Path:
    from lockstep.config.mapping import to_mapping
    from lockstep.run.checkpoints.checkpoint_folder import CheckpointFolder
    from lockstep.run.checkpoints.snapshot import Snapshot
    from lockstep.train.progress import Progress

    torch.manual_seed(0)
    net = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(4, 3)).sum().backward()
    optimizer.step()
    progress = to_mapping(Progress(step=7, overflowed=(3,), skipped_steps=1))
    states = {"average": {}, "optimizer": optimizer.state_dict(), "strategy": {}, "precision": {"name": "fp32"}}
    snapshot = Snapshot(7, dict(net.state_dict()), states, progress, ABOUT, {"--seed": 0})
    checkpoints = CheckpointFolder(folder / "checkpoints", 3)
    checkpoints.save(lambda: snapshot)
    checkpoints.wait()
    return folder / "checkpoints" / "step-00000007"


def _restore(path: Path, name: str) -> Callable[[bytes], object]:
    """Put one file into a checkpoint, with a manifest that fits it, and go on from it."""
    from lockstep.config.run_paths import MANIFEST_FILE
    from lockstep.run.checkpoints import checkpoint_format
    from lockstep.run.records.trackers import Tracker
    from lockstep.run.resume import ResumePoint, restore
    from lockstep.run.session import RunDescription
    from lockstep.train.begin import states_of
    from lockstep.train.optim.ema import NoAverage
    from lockstep.train.precision import Precision
    from lockstep.train.progress import Progress
    from lockstep.train.strategies.base import Strategy

    def read(data: bytes) -> object:
        (path / name).write_bytes(data)
        if name != MANIFEST_FILE:
            manifest = json.loads(whole)
            manifest["files"][name] = checkpoint_format.describe_file(path / name)
            (path / MANIFEST_FILE).write_text(json.dumps(manifest))
        net = nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(net.parameters())
        optim: Any = SimpleNamespace(
            precision=Precision(),
            strategy=Strategy.__new__(Strategy),
            optimizer=optimizer,
            average=NoAverage(net),
            kept=None,
        )
        described = RunDescription({}, states_of(net, optim), "", {}, Tracker)
        return restore(ResumePoint(path), described, Progress)

    whole = (path / MANIFEST_FILE).read_text()
    return read


def _of_checkpoint(name: str) -> Make:
    def make(folder: Path) -> Target:
        path = _checkpoint(folder)
        seed = (path / name).read_bytes()
        return Target(seed, _restore(path, name), (errors.CheckpointError,), as_json=name.endswith("json"))

    make.__name__ = f"checkpoint_{Path(name).stem}"
    return target(make)


for _name in ("state.json", "manifest.json", "model.safetensors", "states.safetensors"):
    _of_checkpoint(_name)


@target
def loop_checkpoint(folder: Path) -> Target:
    """The state of an own loop, which takes a step after the resume."""
    from lockstep.config.run_paths import MANIFEST_FILE
    from lockstep.run.checkpoints import checkpoint_format
    from lockstep.run.connect import TrainingWorld
    from lockstep.world.launcher_environment import RankInfo

    def train(run_folder: Path, optimizes: bool = True) -> None:
        world, net = TrainingWorld(RankInfo(), torch.device("cpu")), nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.1))
        optimizer = torch.optim.AdamW(net.parameters())
        loader = world.loader([torch.ones(3)] * 6, 2, sampler=torch.utils.data.SequentialSampler(range(6)))
        said = io.StringIO()
        with redirect_stderr(said), mock.patch("subprocess.run", side_effect=OSError):  # Git
            run = world.run(run_folder, loader=loader, model=net, optimizer=optimizer, io_every=0)
            for _ in run.epochs(2):
                net[1].p = 0.2
                for batch in loader:
                    if optimizes:  # torch checks no settings of groups
                        net(batch).sum().backward()
                        optimizer.step()
                    run.step(loss=1.0)
                    break
                break
            run.save(best=True)
            run.close()
        assert not [sign for sign in said.getvalue() if not sign.isprintable() and sign != "\n"], said.getvalue()

    def read(data: bytes) -> None:
        shutil.rmtree(folder / "run", ignore_errors=True)
        shutil.copytree(folder / "seed", folder / "run")
        path = next((folder / "run/checkpoints").glob("step-*"))
        (path / "state.json").write_bytes(data)
        manifest = json.loads((path / MANIFEST_FILE).read_text())
        manifest["files"]["state.json"] = checkpoint_format.describe_file(path / "state.json")
        (path / MANIFEST_FILE).write_text(json.dumps(manifest))
        train(folder / "run", optimizes=False)

    train(folder / "seed")
    seed = next((folder / "seed/checkpoints").glob("step-*/state.json")).read_bytes()
    return Target(seed, read, (errors.CheckpointError, errors.ConfigError), as_json=True)


@target
def exported_file(folder: Path) -> Target:
    from lockstep.models import registry
    from lockstep.run.checkpoints import checkpoint_format
    from lockstep.train.inference import load_network

    registry.torchvision_names()  # names that are unknown have it imported
    path = folder / "m.safetensors"
    checkpoint_format.export(path, dict(registry.build("digits-net", 2, 1, 8).state_dict()), ABOUT)
    return Target(path.read_bytes(), _of_file(path, load_network), (errors.CheckpointError,))


@target
def exported_about(folder: Path) -> Target:
    from safetensors.torch import save_file

    from lockstep.models import registry
    from lockstep.train.inference import load_network

    registry.torchvision_names()
    path = folder / "a.safetensors"

    def read(data: bytes) -> object:
        save_file({"w": torch.zeros(1)}, path, metadata={"lockstep": data.decode("latin1")})
        return load_network(path)

    return Target(json.dumps(ABOUT).encode(), read, (errors.CheckpointError,), as_json=True)


def _old(folder: Path, zipped: bool) -> Target:
    from lockstep.models import pretrained, registry
    from lockstep.run.checkpoints import legacy_format

    net = registry.build("digits-net", 10, 1, 8)
    path = folder / "old.pth"
    content = {
        "state_dict": {"w": torch.ones(2, 3), "b": torch.zeros(2)},
        "epoch": 3,
        "arch": "resnet18",
        "best_prec1": 9.5,
        "args": argparse.Namespace(lr=0.1, rates=defaultdict(list, a=[1.0])),
    }
    torch.save(content, path, _use_new_zipfile_serialization=zipped)

    def read(path: Path) -> None:
        legacy_format.load_weights(legacy_format.read(path), net, "digits-net")
        pretrained.read_tensors(path)

    return Target(path.read_bytes(), _of_file(path, read), (errors.CheckpointError,))


@target
def old_checkpoint_zip(folder: Path) -> Target:
    return _old(folder, zipped=True)


@target
def old_checkpoint_pickle(folder: Path) -> Target:
    return _old(folder, zipped=False)


# Data


def _of_image(form: str, change: Callable[[bytes], bytes] = bytes, **options: Any) -> Make:
    def make(folder: Path) -> Target:
        from lockstep.data.decode import decode, evaluation_pixels, header
        from lockstep.data.pack_writer import Encoding
        from lockstep.data.sets import FileSplit, InputSpec

        spec = InputSpec(3, 16, 16, (0.0,) * 3, (1.0,) * 3, 0.875)
        smaller = Encoding(short_side=24)

        def read(path: Path) -> None:
            image = FileSplit([path], [0]).image(0)
            header(FileSplit([path], [0]), 0)
            for use in (
                lambda: decode(image, 1),
                lambda: evaluation_pixels(image, spec),
                lambda: smaller.apply(path.read_bytes(), path),
            ):
                with suppress(errors.CorruptImageError):
                    use()

        put = _of_file(folder / "i.jpg", read)
        seed = change(_image(form, **options))
        return Target(seed, put, (errors.DataError,), memory_bytes=2 * GIB, seconds=30)

    changed = "" if change is bytes else change.__name__
    make.__name__ = f"image_{form.lower()}{''.join(f'_{name}' for name in options)}{changed}"
    return target(make)


def _filled(jpeg: bytes) -> bytes:
    """With bytes that fill up and a marker without a length, which decoders pass over, and more scans than are read."""
    *parts, last = jpeg[:-2].replace(b"\xff\xc2", b"\xff\x01\xff\xff\xc2").split(b"\xff\xda")
    return b"\xff\xda".join([*parts, *[last] * 101]) + b"\xff\xd9"


_of_image("JPEG")
_of_image("JPEG", progressive=True)
_of_image("JPEG", _filled, progressive=True)
for _name in ("PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM"):
    _of_image(_name)
_of_image("TIFF", compression="tiff_lzw")


def _pack(folder: Path) -> Path:
    from packs import pack_folder

    for part in ("train", "val"):
        for name in ("cat", "dog"):
            place = folder / "images" / part / name
            place.mkdir(parents=True)
            for number in range(3):
                (place / f"{number}.jpg").write_bytes(_image("JPEG", quality=30 + number))
    return pack_folder(folder / "images", folder / "pack")


def _of_pack(name: str) -> Make:
    def make(folder: Path) -> Target:
        from lockstep.data import inspection
        from lockstep.data.sources import pack_reader as packed

        pack = _pack(folder)
        path = pack / name if "*" not in name else sorted(pack.glob(name))[0]
        manifest = json.loads((pack / "dataset.json").read_text())

        def read(path: Path) -> None:
            if path.suffix == ".npy":  # else its sum alone would refuse it
                digest = hashlib.sha256(path.read_bytes()).hexdigest()
                manifest["splits"]["train"]["index_sha256"] = digest
                (pack / "dataset.json").write_text(json.dumps(manifest))
            with suppress(errors.DataError):
                for task in inspection.plan(pack).tasks:
                    inspection.verify_task(task)
            for split in packed.splits(pack, packed.Manifest.read(pack)):
                for sample in range(min(9, len(split))):
                    split.read(sample)
                    split.name(sample)

        return Target(path.read_bytes(), _of_file(path, read), (errors.DataError,), as_json=name.endswith("json"))

    make.__name__ = f"pack_{Path(name).suffix[1:]}"
    return target(make)


for _name in ("dataset.json", "train/index.npy", "train/*.tar"):
    _of_pack(_name)


def _of_imagenet(which: str) -> Make:
    def make(folder: Path) -> Target:
        from packs import tar_of

        from lockstep.data.sources import prepare_imagenet
        from lockstep.data.sources.prepare_imagenet import look, prepare

        prepare_imagenet.numbered_classes = lambda: ("n00000001", "n00000002")
        base, image = "ILSVRC2012_devkit_t12/data/", _image("JPEG")
        contents = {
            "train": tar_of(
                {f"n0000000{n}.tar": tar_of({f"n0000000{n}_{i}.JPEG": image for i in (3, 4)}) for n in (1, 2)}
            ),
            "val": tar_of({f"ILSVRC2012_val_0000000{n}.JPEG": image for n in (1, 2)}),
            "devkit": tar_of({f"{base}ILSVRC2012_validation_ground_truth.txt": b"1\n2\n"}),
        }
        paths = {name: folder / f"{name}.tar" for name in contents}
        for name, content in contents.items():
            paths[name].write_bytes(content)

        def read(path: Path) -> None:
            shutil.rmtree(folder / "dest", ignore_errors=True)
            prepare(look(*paths.values()), folder / "dest", lambda count: None)

        seed = contents[which]
        put = _of_file(paths[which], read)
        return Target(seed, put if which != "devkit" else lambda data: put(gzip.compress(data, 1)), (errors.DataError,))

    make.__name__ = f"imagenet_{which}"
    return target(make)


for _name in ("train", "val", "devkit"):
    _of_imagenet(_name)


@target
def imagenet_devkit_gzip(folder: Path) -> Target:
    inner = _of_imagenet("devkit")(folder)
    path = folder / "devkit.tar"

    def read(data: bytes) -> object:
        from lockstep.data.sources.prepare_imagenet import look

        path.write_bytes(data)
        return look(folder / "train.tar", folder / "val.tar", path)

    return Target(gzip.compress(inner.seed), read, (errors.DataError,))


# Launching


@target
def slurm_hosts(folder: Path) -> Target:
    from lockstep.world.slurm_hostlist import counts, expand

    def read(data: bytes) -> None:
        text = data.decode("latin1")
        for parse in (expand, counts):
            with suppress(ValueError):
                parse(text)

    return Target(b"hal[01-04,07],x,r[1-2]n[01-03]-ib", read)


@target
def host_file(folder: Path) -> Target:
    from lockstep.launch.plan.hosts import parse_discovered, parse_hosts, read_hostfile

    def read(path: Path) -> None:
        text = path.read_bytes().decode("latin1")
        for parse in (lambda: read_hostfile(path), lambda: parse_hosts(text), lambda: parse_discovered(text, None)):
            with suppress(errors.ConfigError):
                parse()

    return Target(b"node1 slots=4\nnode2 slots=2 max-slots=8 # fast\n[fe80::1]:3\n", _of_file(folder / "hosts", read))


ENVIRONMENTS = [
    {"SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "hal[01-02]", "SLURM_NTASKS": "8", "SLURM_TASKS_PER_NODE": "4(x2)"},
    {"SLURM_JOB_NODELIST": "a,b", "SLURM_GPUS": "a100:8", "SLURM_GPUS_ON_NODE": "4", "SLURM_STEP_ID": "0"},
    {"PBS_JOBID": "9", "PBS_NODEFILE": "nodes", "PBS_NUM_PPN": "4", "text": "a\nb\n"},
    {"LSB_JOBID": "8", "LSB_DJOB_HOSTFILE": "nodes", "LSB_MCPU_HOSTS": "a 4 b 4", "text": "batch1\na\na\n"},
    {"JOB_ID": "7", "PE_HOSTFILE": "nodes", "text": "a 4 all.q UNDEFINED\nb 2 all.q UNDEFINED\n"},
]


@target
def batch_systems(folder: Path) -> Target:
    from lockstep.launch.plan import hosts

    def read(data: bytes) -> None:
        for environment in _environments(data):
            with mock.patch.object(hosts, "read_text", return_value=environment.get("text", "")):
                hosts.find_allocation(environment, lambda: 2)

    return Target(_lines(ENVIRONMENTS), read, (errors.ConfigError,), as_json=True)


def _environments(data: bytes) -> list[dict[str, str]]:
    found = []
    for line in data.splitlines():
        try:
            values = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(values, dict):
            found.append({str(name): str(value) for name, value in values.items()})
    return found


PLACES = [
    {
        "RANK": "1",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "0",
        "TORCHELASTIC_RUN_ID": "x",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    },
    {
        "OMPI_COMM_WORLD_RANK": "1",
        "OMPI_COMM_WORLD_SIZE": "4",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "OMPI_MCA_orte_hnp_uri": "1.0;tcp://127.0.0.1,10.0.0.1:4",
    },
    {
        "SLURM_PROCID": "3",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "7",
        "SLURM_LOCALID": "3",
        "SLURM_STEP_TASKS_PER_NODE": "4,3",
        "SLURM_NODEID": "0",
        "SLURM_STEP_NODELIST": "a[1-2]",
    },
    {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1", "PBS_NODEFILE": "/dev/null"},
    {
        "HOROVOD_RANK": "1",
        "HOROVOD_SIZE": "2",
        "HOROVOD_LOCAL_RANK": "0",
        "HOROVOD_LOCAL_SIZE": "1",
        "HOROVOD_CROSS_RANK": "1",
    },
]


@target
def launcher_variables(folder: Path) -> Target:
    from lockstep.world.launcher_environment import RankInfo
    from lockstep.world.rank0_address import find_address

    sys.modules["mpi4py"] = None  # type: ignore[assignment] # where it is installed, it would load the MPI library

    def read(data: bytes) -> None:
        for environment in _environments(data):
            find_address(RankInfo.from_environment(environment), environment)

    return Target(_lines(PLACES), read, (errors.WorldError,), as_json=True)


@target
def launcher_messages(folder: Path) -> Target:
    from lockstep.launch.protocol.messages import (
        LIMIT_BYTES,
        Ended,
        Introduction,
        Knock,
        MessageError,
        NodeReady,
        Output,
        WorkerFailure,
        pack,
        receive,
    )

    async def hear(data: bytes) -> None:
        reader = asyncio.StreamReader(limit=LIMIT_BYTES)
        reader.feed_data(data)
        reader.feed_eof()
        while await receive(reader):
            pass

    failed = Ended((WorkerFailure(rank=3, code=1, age=0.5),), left=(5,))
    messages = [NodeReady({"torch": "2"}, {"10.0.0.1": 4}), Output(1, "stdout", "x"), Knock(1, ""), failed]
    seed = b"".join(pack(each) for each in [*messages, Introduction(1, 2, 1, "a")])
    return Target(seed, lambda data: asyncio.run(hear(data)), (MessageError,), as_json=True)


# Records and reports


@target
def io_records(folder: Path) -> Target:
    from lockstep.files.io_records import job_io

    (folder / "io").mkdir()
    records = [
        {"kind": "io", "rank": r, "unix_time": 1000.0 + t, "seconds": 10.0, "read_bytes": 5}
        for t in (10, 20)
        for r in (0, 1)
    ]
    return Target(
        _lines(records), _of_file(folder / "io" / "worker-0.jsonl", lambda path: job_io(folder)), (), as_json=True
    )


def _report(*paths: Path) -> None:
    """Make a report's pages, and see that nothing in them became markup."""
    from lockstep.report.draw import page
    from lockstep.report.draw import text as texts
    from lockstep.report.sections import build
    from lockstep.report.sources import gather

    document = build(gather(paths), "Training results")
    texts.to_markdown(document)
    text = page.render(document)
    assert MARKER not in text, "a record's text became a script of the page"
    assert "<img src=x" not in text, "a record's text became an element of the page"


def _of_run(name: str) -> Make:
    def make(folder: Path) -> Target:
        from report_material import io_record, make_run, write_lines

        run = make_run(folder / "run")
        write_lines(run / "io" / "worker-0.jsonl", [io_record(0, 1000.0 + 10 * step) for step in range(4)])
        (run / "logs").mkdir()
        (run / "logs" / "worker-0.log").write_text("2026-01-01 00:00:00,1 worker 0 ERROR RuntimeError: x\n")
        path = run / name
        seed = path.read_bytes()
        if name == "config.yaml":
            seed = json.dumps({"seed": 0, "numerics": {"precision": "fp32"}, "data": {"dataset": "x"}}).encode()

        def read(path: Path) -> None:
            _watch(run)
            with suppress(errors.ConfigError):
                _report(run)

        return Target(seed, _of_file(path, read), as_json=not name.endswith("log"))

    make.__name__ = f"run_{Path(name).parts[0].partition('.')[0]}"
    return target(make)


def _watch(run: Path) -> None:
    """Draw a run as `lockstep watch` does, and see that nothing in its files steers the terminal."""
    from rich.console import Console

    from lockstep.report.watch.frame import draw_frame
    from lockstep.report.watch.run import RunWatch

    snapshot = RunWatch(run).look(time.time())
    shown = io.StringIO()
    Console(file=shown, width=80, force_terminal=True).print(*draw_frame(snapshot, 80, 30), sep="\n")
    assert "\x1b]" not in shown.getvalue(), "a record's text steers the terminal"
    assert "\x1b[2J" not in shown.getvalue(), "a record's text steers the terminal"


for _name in ("metrics.jsonl", "environment.json", "config.yaml", "io/worker-0.jsonl", "logs/worker-0.log"):
    _of_run(_name)


@target
def report_studies(folder: Path) -> Target:
    from report_material import batch_record, loading_record, scaling_record

    records = [
        *(scaling_record(workers) for workers in (1, 2, 4)),
        *(batch_record(batch) for batch in (32, 64)),
        loading_record(),
    ]
    return Target(_lines(records), _of_file(folder / "study.jsonl", _report), (errors.ConfigError,), as_json=True)
