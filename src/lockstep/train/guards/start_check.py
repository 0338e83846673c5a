"""Run the start checks of workers in one process: data set, network, checkpoint. Leaves no files behind."""

from __future__ import annotations

import tempfile
from contextlib import closing
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import torch

from lockstep.config.run_paths import RUNS
from lockstep.config.schema import ParallelConfig, TrainConfig, check_workers
from lockstep.data import catalog
from lockstep.errors import ConfigError, DataError
from lockstep.files.folder_lock import check_free
from lockstep.models import registry
from lockstep.models.batch_norms import check_batch_norm
from lockstep.run.checkpoints.legacy_format import is_old
from lockstep.run.records.run_folder import LOCKED_HINT, RunFolder, check_writable, resumed_run_path
from lockstep.run.resume import check_unused, find_resume_point
from lockstep.train.begin import begin_at
from lockstep.train.guards.checks import check_training
from lockstep.train.inference import load_network
from lockstep.train.optim.build import freeze
from lockstep.train.setup import DECODING, build_job, build_model, check_decoding, load_data
from lockstep.world.launcher_environment import RankInfo
from lockstep.world.world import World


def check_start(config: TrainConfig, workers: int) -> list[str]:
    """Build the job in a temporary folder, on this machine's CPU; return lines that describe it.

    Not checked: the hosts, the GPUs, and weights that would have to be downloaded.

    Raises:
        LockstepError: The job cannot start; the same error as in a real start.
    """
    check_workers(config, workers)
    world, source = alone(), config.data.source
    missing = next((name for name in config.run.track if name != "tensorboard" and find_spec(name) is None), None)
    if missing:
        raise ConfigError(f"--track {missing}: not installed; pip install 'lockstep-torch[{missing}]'")
    try:
        data = load_data(replace(config, data=replace(config.data, download=False)), world)
    except DataError:
        if not (config.data.download and source in catalog.NAMED and catalog.NAMED[source].fetched):
            raise
        model = _build_network(config, catalog.NAMED[source].images)
        _check_norms(model, config, workers)
        freeze(model, config.model.freeze)
        return [f"{source} is not in {config.data.data_dir}; the first worker of each node downloads it"]
    check_decoding(config, data, "cpu" if config.device == "cpu" else DECODING, "every worker")
    model = build_model(config, data)
    check_training(config, model, data, workers)
    _check_norms(model, config, workers)
    point = find_resume_point(config, world)
    path = config.run.run_dir or resumed_run_path(config)
    check_writable(path or RUNS)
    if path:
        check_free(path, LOCKED_HINT)
    with tempfile.TemporaryDirectory() as folder:
        job = build_job(_for_one(config, workers, point.state, Path(folder)), world, data, model)
        with closing(job):
            begun = begin_at(job.progress, config, job.steps_per_epoch)
            is_new = point.state is None or is_old(point.state) or begun is not job.progress
            if path:
                check_unused(config, RunFolder(path), is_new, "to resume, add --resume auto")
            facts = f"{len(data.train):,} + {len(data.val):,} images, {len(data.classes)} classes"
            lines = [f"{data.name}: {facts}", f"{config.model.arch}: {_size(job.network.model):,} parameters"]
            resumed = [f"resumes from {point.state}, after step {begun.step:,}"] if point.state else []
            return [*lines, *point.notes, *resumed]


def check_checkpoint(path: Path, arch: str | None) -> list[str]:
    """Rebuild the network of a checkpoint, a run folder or an exported file for an evaluation.

    Raises:
        CheckpointError: The network cannot be rebuilt.
    """
    if is_old(path):  # its network depends on the data set
        return [f"evaluates {path}"]
    network = load_network(path, arch)
    return [f"evaluates {path}: {_size(network.model):,} parameters, {len(network.classes)} classes"]


def alone() -> World:
    """Return a world of one worker on the CPU."""
    return World(RankInfo(), torch.device("cpu"))


def _for_one(config: TrainConfig, workers: int, state: Path | None, folder: Path) -> TrainConfig:
    """Return the same job for one worker on a CPU, with the global batch of all workers, and without tracking."""
    of_all = config.global_batch_size is None and config.batch_workers is None
    pretrained = None if config.model.pretrained == "default" else config.model.pretrained
    return replace(
        config,
        batch_workers=workers if of_all else config.batch_workers,
        data=replace(config.data, loader_workers=0, decode="cpu"),
        model=replace(config.model, compile=False, cuda_graph=False, pretrained=None if state else pretrained),
        parallel=ParallelConfig(),
        run=replace(
            config.run, run_dir=folder / "run", resume=str(state) if state else None, start_epoch=None, track=()
        ),
    )


def _check_norms(model: torch.nn.Module, config: TrainConfig, workers: int) -> None:
    strategy = config.parallel.strategy
    if config.parallel.sync_bn and (strategy in ("ddp", "horovod") or (strategy == "auto" and workers > 1)):
        check_batch_norm(model)


def _build_network(config: TrainConfig, images: str) -> torch.nn.Module:
    """Build the network for images such as "28 x 28 gray"."""
    return registry.build(config.model.arch, 10, 1 if "gray" in images else 3, int(images.split()[0]))


def _size(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
