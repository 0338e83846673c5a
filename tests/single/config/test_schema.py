"""The configuration: what is read, what is refused, and that the refusal names the flag."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

import pytest
import yaml

from lockstep.config.mapping import from_mapping, to_mapping
from lockstep.config.schema import (
    AugmentConfig,
    DataConfig,
    ModelConfig,
    NumericsConfig,
    OptimConfig,
    ParallelConfig,
    RunConfig,
    TrainConfig,
    check_workers,
)
from lockstep.errors import ConfigError

# Every field has another value than its default, but for those that contradict others. A new field belongs in here.
FULL = """
data: {dataset: cifar10, data_dir: /scratch/data, download: false, loader_workers: 4, in_memory: never, image_size: 64,
  bits: 12, decode: gpu, drop_last: true, skip_corrupt: true}
augment: {shift: 4, shift_padding: reflect, flip: true, flip_alternate: true, rotate: 15.0, zoom: 0.2, shear: 5.0,
  cutout: 8, min_crop: 0.123, rand_augment: 2, rand_augment_magnitude: 11, random_erasing: 0.25, mixup: 0.2,
  cutmix: 1.0}
model: {arch: resnet50, pretrained: default, freeze: [conv1, layer1.*], channels_last: true, compile: true,
  cuda_graph: true, ema_decay: 0.999}
optim: {optimizer: adamw, lr: 3e-4, lr_base_batch: 333, lr_scaling: sqrt, momentum: 0.95, nesterov: false,
  weight_decay: 0.05, decay_all: false, schedule: onecycle, warmup_epochs: 5.5, lr_milestones: [1.0, 2.5],
  lr_gamma: 0.2, lr_final: 0.01, label_smoothing: 0.15, clip_norm: 1.5}
parallel: {strategy: ddp, find_unused_parameters: true, sync_bn: true, compress: bf16, shard_optimizer: true,
  dist_backend: gloo, check_replicas: 7, balance: true}
numerics: {precision: O2, loss_scale: 128.0, keep_batchnorm_fp32: true, on_nan: skip}
run: {run_dir: runs/x, start_epoch: 2, desired_acc: 0.75, time_limit: "2-12:30", resume: auto, evaluate: true,
  checkpoint_epochs: 2, checkpoint_steps: 50, snapshot_steps: 10, keep: 5, log_every: 7, io_every: 2.5,
  track: [mlflow, wandb], verbose: true}
epochs: 3
max_steps: 100
global_batch_size: 512
accumulate: 2
seed: 9
device: cpu
"""


def _pairs(config: Any, default: Any, path: str = "") -> list[tuple[str, Any, Any]]:
    rows = []
    for item in fields(config):
        ours, theirs = getattr(config, item.name), getattr(default, item.name)
        if is_dataclass(ours):
            rows += _pairs(ours, theirs, f"{path}{item.name}.")
        else:
            rows.append((path + item.name, ours, theirs))
    return rows


def test_every_field_survives_being_written_and_read() -> None:
    full = from_mapping(TrainConfig, yaml.safe_load(FULL), "file")
    unchanged = [name for name, ours, default in _pairs(full, TrainConfig()) if ours == default]
    batches = ["batch_size", "batch_workers"]
    assert unchanged == ["data.data", "augment.trivial_augment", "parallel.powersgd_rank", "run.quiet", *batches]
    others = TrainConfig(
        data=DataConfig(data="mypackage.data:load", loader_workers="auto"),
        augment=AugmentConfig(trivial_augment=True),
        parallel=ParallelConfig(compress="powersgd", powersgd_rank=2),
        run=RunConfig(quiet=True),
        batch_size=64,
    )
    for config in (full, others, TrainConfig()):
        assert from_mapping(TrainConfig, yaml.safe_load(yaml.safe_dump(to_mapping(config))), "file") == config


@pytest.mark.parametrize(
    ("kind", "settings", "flags"),
    [
        (DataConfig, {"dataset": "mnist", "data": "a:b"}, "DATASET --data"),
        (DataConfig, {"data": "mypackage.load"}, "--data"),
        (DataConfig, {"loader_workers": -1}, "--workers"),
        (DataConfig, {"image_size": 0}, "--image-size"),
        (DataConfig, {"bits": 32}, "--bits"),
        (AugmentConfig, {"shift": -1}, "--shift"),
        (AugmentConfig, {"rotate": -1.0}, "--rotate"),
        (AugmentConfig, {"shear": 90.0}, "--shear"),
        (AugmentConfig, {"cutout": -1}, "--cutout"),
        (AugmentConfig, {"zoom": 1.0}, "--zoom"),
        (AugmentConfig, {"zoom": -0.1}, "--zoom"),
        (AugmentConfig, {"min_crop": 0.0}, "--min-crop"),
        (AugmentConfig, {"min_crop": 1.1}, "--min-crop"),
        (AugmentConfig, {"random_erasing": 1.5}, "--random-erasing"),
        (AugmentConfig, {"random_erasing": math.nan}, "--random-erasing"),
        (AugmentConfig, {"trivial_augment": True, "rand_augment": 2}, "--trivial-augment --rand-augment"),
        (ModelConfig, {"ema_decay": 1.0}, "--ema-decay"),
        (ModelConfig, {"ema_decay": -0.1}, "--ema-decay"),
        (OptimConfig, {"lr": 0.0}, "--lr"),
        (OptimConfig, {"lr_base_batch": 0}, "--lr-base-batch"),
        (OptimConfig, {"weight_decay": -1.0}, "--weight-decay"),
        (OptimConfig, {"warmup_epochs": -1.0}, "--warmup-epochs"),
        (OptimConfig, {"clip_norm": -1.0}, "--clip-norm"),
        (OptimConfig, {"momentum": 1.0}, "--momentum"),
        (OptimConfig, {"label_smoothing": 1.0}, "--label-smoothing"),
        (OptimConfig, {"lr_milestones": (30.0, 30.0)}, "--lr-milestones"),
        (RunConfig, {"quiet": True, "verbose": True}, "--quiet --verbose"),
        (RunConfig, {"keep": 0}, "--keep"),
        (RunConfig, {"log_every": 0}, "--log-every"),
        (RunConfig, {"io_every": -1.0}, "--io-every"),
        (RunConfig, {"checkpoint_epochs": -1}, "--checkpoint-epochs"),
        (RunConfig, {"checkpoint_steps": -1}, "--checkpoint-steps"),
        (TrainConfig, {"run": RunConfig(evaluate=True)}, "--evaluate --resume --pretrained"),
        (
            TrainConfig,
            {"run": RunConfig(resume="runs/a"), "model": ModelConfig(pretrained="default")},
            "--pretrained --resume",
        ),
        (TrainConfig, {"epochs": 0}, "--epochs"),
        (TrainConfig, {"max_steps": 0}, "--max-steps"),
        (TrainConfig, {"batch_size": 0}, "--batch-size"),
        (TrainConfig, {"global_batch_size": 0}, "--global-batch-size"),
        (TrainConfig, {"batch_size": 1, "global_batch_size": 1}, "--batch-size --global-batch-size"),
        (TrainConfig, {"accumulate": 0}, "--accumulate"),
        (TrainConfig, {"seed": -1}, "--seed"),
        (TrainConfig, {"batch_workers": 2, "global_batch_size": 8}, "--batch-workers --global-batch-size"),
        (TrainConfig, {"parallel": ParallelConfig(strategy="dp"), "model": ModelConfig(compile=True)}, "--strategy"),
        (TrainConfig, {"numerics": NumericsConfig(precision="O3"), "model": ModelConfig(ema_decay=0.9)}, "--ema-decay"),
        (ParallelConfig, {"balance": True, "compress": "powersgd"}, "--balance --compress"),
        (RunConfig, {"desired_acc": 1.5}, "--desired-acc"),
        # No comparison refuses these by itself.
        (OptimConfig, {"lr": math.nan}, "--lr"),
        (OptimConfig, {"lr": math.inf}, "--lr"),
        (OptimConfig, {"weight_decay": math.nan}, "--weight-decay"),
        (OptimConfig, {"clip_norm": math.nan}, "--clip-norm"),
        (AugmentConfig, {"rotate": math.nan}, "--rotate"),
        (AugmentConfig, {"zoom": math.nan}, "--zoom"),
        (NumericsConfig, {"on_nan": "rewind"}, "--on-nan"),  # `fit` passes any value
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_invalid_or_contradicting_value_is_refused_with_its_flag(
    kind: Callable[..., object], settings: dict[str, Any], flags: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        kind(**settings)
    assert all(re.search(rf"{flag}\b(?!-)", str(caught.value)) for flag in flags.split())


@pytest.mark.parametrize(
    ("settings", "workers", "words"),
    [
        ({"parallel": ParallelConfig(strategy="single")}, 2, "--strategy single is for one worker, but there are 2"),
        ({"global_batch_size": 7, "accumulate": 2}, 4, "--global-batch-size 7 .* make it 8 or more"),
        ({"global_batch_size": 2}, 3, "--global-batch-size 2 .* make it 3 or more"),
    ],
)
def test_a_number_of_workers_that_does_not_fit_is_refused(settings: dict[str, Any], workers: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_workers(TrainConfig(**settings), workers)


def test_the_limits_themselves_are_allowed() -> None:
    AugmentConfig(min_crop=1.0, zoom=0.0)
    OptimConfig(momentum=0.0, label_smoothing=0.0, lr_milestones=())
    TrainConfig(run=RunConfig(checkpoint_epochs=0, evaluate=True, resume="auto"))
    TrainConfig(run=RunConfig(evaluate=True), model=ModelConfig(pretrained="default"))
    TrainConfig(run=RunConfig(resume="auto"), model=ModelConfig(pretrained="default"))
    DataConfig(loader_workers=0, image_size=1)
    check_workers(TrainConfig(parallel=ParallelConfig(strategy="single")), 1)
    check_workers(TrainConfig(global_batch_size=8, accumulate=2), 4)
    check_workers(TrainConfig(batch_size=1, accumulate=2), 4)


def test_the_source_is_the_one_thing_given() -> None:
    assert DataConfig().source == "digits"
    assert DataConfig(dataset="mnist").source == "mnist"
    assert DataConfig(data="mypackage:load").source == "mypackage:load"
