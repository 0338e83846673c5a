"""Checks that stop a faulty run before its first step.

- `check_same_job`: whether all workers have the same job, before the first collective that could hang or give wrong
  results. Workers started by mpirun or manually may have different files, Lockstep versions or incomplete data sets.
  Each worker describes its job, and the first difference raises an error on all workers.
- `check_model` and `check_training`: whether a model fits its data and the batches, with blank images or an item.
"""

from __future__ import annotations

import hashlib
import json
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

import lockstep
from lockstep.config.mapping import to_mapping
from lockstep.config.schema import TrainConfig
from lockstep.data import catalog
from lockstep.data.sets import EncodedSplit, ImageData, MemorySplit, Split, UserSplit
from lockstep.data.sharding import evaluation_batches
from lockstep.errors import ConfigError
from lockstep.models.trial_forward import UnfitImageError, send_blank
from lockstep.train.optim.build import freeze
from lockstep.train.optim.schedule import Batching, build_sharding, plan_batches
from lockstep.world.world import World

Description = Mapping[str, Mapping[str, Any]]
"""The job of one worker: part to name to JSON value."""


# Settings that may differ: paths, downloading and reading on a host, and settings that only rank 0 uses.
_OWN = (
    "device",
    "data.data_dir",
    "data.download",
    "data.loader_workers",
    "data.decode",
    "model.pretrained",
    "run.run_dir",
    "run.resume",
    "run.keep",
    "run.io_every",
    "run.track",
    "run.time_limit",
)
_FIXES = {
    "software": "install the same on both",
    "configuration": "start all workers with the same flags and the same recipe",
    "code": "give all workers the same files",
    "decoders": "install the same on both",
    "data": "give all workers the same data set",
    "model": "build the same model on every worker",
}
_FILES_COMPARED = 16  # per split, by name and size


def check_same_job(
    world: World, config: TrainConfig, data: ImageData | None = None, model: nn.Module | None = None
) -> None:
    """Compare the jobs of all workers, as far as they are loaded. Collective.

    Raises:
        ConfigError: A worker's job differs, or the model has lazy parameters; raised on all workers.
    """
    if world.size > 1:
        _compare(world, config, data, model)
    if unshaped := [name for name, value in (model.state_dict().items() if model else ()) if is_lazy(value)]:
        raise ConfigError(
            f"the model's {unshaped[0]} is lazy and has no shape yet: run a batch through the model first, or give "
            f"its layers their sizes"
        )


def _compare(world: World, config: TrainConfig, data: ImageData | None, model: nn.Module | None) -> None:
    own = describe_job(config, data, model)
    digest = hashlib.sha256(json.dumps(own).encode()).hexdigest()
    if len(set(map(str, world.gather(digest)))) == 1:
        return
    workers = world.gather([socket.gethostname(), own])
    raise ConfigError(difference([host for host, _ in workers], [each for _, each in workers]))


def describe_job(config: TrainConfig, data: ImageData | None = None, model: nn.Module | None = None) -> Description:
    """Describe everything that must be equal on all workers, likely causes before their consequences."""
    parts: dict[str, Mapping[str, Any]] = {"software": _software(), "configuration": _configuration(config)}
    if data is not None:
        parts["code"] = _code(config)
        parts["decoders"] = _decoders(data)
        parts["data"] = _data(data)
    if model is not None:
        parts["model"] = {name: _form(value) for name, value in model.state_dict().items()}
    return parts


def difference(hosts: Sequence[str], workers: Sequence[Description]) -> str:
    """Return a line on the first difference between any worker and worker 0; "" if there is none. Both are by rank."""
    for rank, theirs in enumerate(workers):
        for part, expected in workers[0].items():
            for first, other in zip_longest(expected.items(), theirs.get(part, {}).items(), fillvalue=("nothing", "")):
                if first != other:
                    return (
                        f"worker {rank}'s {part} differs from worker 0's: {_detail(part, *first, *other)} (worker "
                        f"{rank} is on {hosts[rank]}, worker 0 on {hosts[0]}); {_FIXES[part]}"
                    )
    return ""


def _detail(part: str, name: str, value: Any, their_name: str, theirs: Any) -> str:
    if part == "model" or name != their_name:
        return f"{f'{their_name} {theirs}'.strip()} instead of {f'{name} {value}'.strip()}"
    if isinstance(value, list) and isinstance(theirs, list):
        pairs = enumerate(zip_longest(theirs, value, fillvalue="missing"))
        index, (their_item, item) = next((i, (a, b)) for i, (a, b) in pairs if a != b)
        return f"{name}[{index}] is {their_item}, not {item}"
    return f"{name} is {theirs}, not {value}"


def _software() -> dict[str, str]:
    releases = {"torch": _release("torch"), **{name: _series(_release(name)) for name in ("torchvision", "numpy")}}
    python = "{}.{}".format(*sys.version_info)
    return {"Lockstep": lockstep.__version__, **releases, "Python": python, "Lockstep's source": _own_source()}


def _release(name: str) -> str:
    """Return a package's version without its build (+cpu, +cu128); "none" without metadata."""
    try:
        return version(name).partition("+")[0]
    except PackageNotFoundError:
        return "none"


def _series(release: str) -> str:
    """Return a version without its patch number."""
    return ".".join(release.split(".")[:2])


def _decoders(data: ImageData) -> dict[str, str]:
    """Return the versions of the image decoders, if used: other versions round differently."""
    splits = (data.train, data.val)
    of_files = any(
        isinstance(split.source if isinstance(split, MemorySplit) else split, EncodedSplit) for split in splits
    )
    return {name: _series(_release(name)) for name in ("Pillow", "simplejpeg")} if of_files else {}


def _form(value: Any) -> str:
    """Describe a state by its shape, or by its type if it is not a tensor."""
    if is_lazy(value) or not isinstance(value, torch.Tensor):
        return f"of type {type(value).__name__}"
    return f"of shape {list(value.shape)}"


@cache
def _own_source() -> str:
    """Return a digest of Lockstep's source files."""
    root, digest = Path(lockstep.__file__).parent, hashlib.sha256()
    for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix()):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def _configuration(config: TrainConfig) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name, value in to_mapping(config).items():
        fields |= {f"{name}.{key}": item for key, item in value.items()} if isinstance(value, dict) else {name: value}
    if config.data.dataset and config.data.dataset not in catalog.NAMED:
        del fields["data.dataset"]  # a folder's path may differ between hosts; its content is compared
    fields["--pretrained is given"] = config.model.pretrained is not None
    return {name: value for name, value in fields.items() if name not in _OWN}


def _code(config: TrainConfig) -> dict[str, str]:
    """Return digests of the files of the user's model and data functions."""
    references = {"--model": config.model.arch, "--data": config.data.data or ""}
    names = {flag: reference.partition(":")[0] for flag, reference in references.items() if ":" in reference}
    return {f"{flag}'s module {name}": _module_digest(name) for flag, name in names.items()}


def _module_digest(name: str) -> str:
    file = getattr(sys.modules.get(name), "__file__", None)
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()[:12] if file and Path(file).is_file() else "without file"


def _data(data: ImageData) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "number of training samples": len(data.train),
        "number of validation samples": len(data.val),
        "classes": list(data.classes),
        "input": [_rounded(part) for part in astuple(data.input)],
    }
    for role, split in (("training", data.train), ("validation", data.val)):
        facts |= {f"digest of {role} {what}": value for what, value in _content(split).items()}
        facts[f"form of {role} images"] = type(split).__name__
    return facts


def _rounded(part: Any) -> Any:
    """Round numbers computed from pixels to 6 decimals, because the last bits depend on the library."""
    return [round(number, 6) for number in part] if isinstance(part, tuple) else part


def _content(split: Split) -> dict[str, str]:
    """Return digests that identify a split without reading all of it."""
    if isinstance(split, MemorySplit) and split.source is not None:
        shape = f"of shape {list(split.images.shape)}"  # no pixels, which depend on the decoder
        return {**_content(split.source), "labels": _digest(split.labels.cpu().numpy()), "images": shape}
    if isinstance(split, MemorySplit):
        ends = split.images[[0, -1]]
        return {
            "labels": _digest(split.labels.cpu().numpy()),
            "images": _digest(ends.cpu().contiguous().numpy()) + f" of shape {list(split.images.shape)}",
        }
    chosen = np.unique(np.linspace(0, len(split) - 1, min(len(split), _FILES_COMPARED)).astype(int)).tolist()
    if isinstance(split, EncodedSplit):
        files = [[*Path(split.name(sample)).parts[-2:], _size_of(split, sample)] for sample in chosen]
        labels = np.ascontiguousarray(split.labels, dtype=np.int64)
        return {"labels": _digest(labels), "files' names and sizes": _digest(json.dumps(files).encode())}
    if not split.classes:
        return {}  # the user may draw such targets at random
    return {"first and last label": str([_label_of(split.dataset, sample) for sample in (0, len(split) - 1)])}


def _size_of(split: EncodedSplit, sample: int) -> int:
    try:
        return len(split.read(sample))
    except (OSError, ValueError):  # a pipe, a device, or a file that is too large
        return -1  # training will report the image


def _label_of(dataset: Any, sample: int) -> int:
    try:
        return int(dataset[sample][1])
    except Exception:
        return -1  # as above


def _digest(content: Any) -> str:
    return hashlib.sha256(content).hexdigest()[:12]


def check_model(name: str, model: nn.Module, data: ImageData, hint: str = "") -> None:
    """Check that a model takes the data's inputs and, if there are classes, returns a logit for each.

    Args:
        name: How the user chose the model, such as "model=" or "--arch resnet18".
        hint: Suggested fix if the model does not accept the inputs.

    Raises:
        ConfigError: The model does not fit the data.
    """
    if _is_lazy(model):
        return  # check_same_job rejects lazy parameters
    inputs, classes, samples = _trial_inputs(data, 1), len(data.classes), 1
    try:
        outputs = send_blank(model, inputs)
    except UnfitImageError:
        try:  # batch norm without running statistics needs two
            outputs, samples = send_blank(model, _trial_inputs(data, 2)), 2
        except UnfitImageError as error:
            what = f"images of shape {list(inputs.shape[1:])}" if data.has_images else "the inputs of the training set"
            raise ConfigError(f"{name} cannot take {what}: {error}{hint}") from None
    if got := _unlike_logits(outputs, samples, classes):
        given = f"one {data.noun[:-1]}" if samples == 1 else f"two {data.noun}"
        number = "" if data.has_images else "; if the targets are numbers and not classes, make them floating point"
        raise ConfigError(
            f"{name} returned {got} for {given}, but the data has {classes} classes: return logits "
            f"[N, {classes}]{number}"
        )


def _trial_inputs(data: ImageData, count: int) -> Any:
    """Return blank images or, for other inputs, the first item of the training set, `count` times."""
    if isinstance(data.train, UserSplit) and not data.has_images:
        return data.train.batch_of([data.train.dataset[0]] * count)[0]
    return torch.zeros(count, data.input.channels, data.input.height, data.input.width, device="cpu")


def _unlike_logits(outputs: object, samples: int, classes: int) -> str:
    """Describe outputs that are not logits of the samples; "" if they are, or if there are no classes."""
    if not classes:
        return ""
    if not isinstance(outputs, torch.Tensor):
        return f"a {type(outputs).__name__}"
    is_right = outputs.ndim == 2 and outputs.shape[0] == samples and outputs.shape[1] >= classes
    return "" if is_right else f"a tensor of shape {list(outputs.shape)}"


def _is_lazy(model: nn.Module) -> bool:
    return any(is_lazy(parameter) for parameter in model.parameters())


def check_training(config: TrainConfig, model: nn.Module, data: ImageData, workers: int) -> None:
    """Check in training mode that a custom model returns logits, and that any takes the smallest forward pass.

    Batch norm needs two values per channel, so one sample may be too few for it.

    Raises:
        ConfigError: The model returns something else, such as auxiliary outputs; or it takes two samples, but a
            worker's forward pass has one, which the model does not take.
    """
    step = _step_of_one(config, data, workers)
    if _is_lazy(model) or (step is None and not config.model.is_custom):
        return
    if config.model.is_custom:
        check_evaluation(config.model.arch, model, data, plan_batches(config, workers), workers)
    frozen, classes = freeze(model, config.model.freeze), len(data.classes)
    two, one = _trial_inputs(data, 2), _trial_inputs(data, 1)
    try:
        outputs = send_blank(model, two, training=True, frozen=frozen)
    except UnfitImageError:
        return  # it may need more samples
    if got := _unlike_logits(outputs, 2, classes):
        raise ConfigError(
            f"{config.model.arch} returned {got} for two {data.noun} in training mode; return logits [N, {classes}] "
            f"there, too, without auxiliary outputs"
        )
    if step is None:
        return
    try:
        send_blank(model, one, training=True, frozen=frozen)
    except UnfitImageError as error:
        where, fix = ("the last step of an epoch", "add --drop-last, or ") if step else ("a step", "")
        batching = plan_batches(config, workers)
        raise ConfigError(
            f"{config.model.arch} cannot train on one {data.noun[:-1]} ({error}), but {where} leaves a worker one: "
            f"{len(data.train):,} {data.noun} in global batches of {batching.global_batch} = {batching.reason}; {fix}"
            f"change --batch-size or the number of workers"
        ) from None


def check_evaluation(name: str, model: nn.Module, data: ImageData, batching: Batching, workers: int) -> None:
    """Check that a model that cannot take one sample gets more in each batch of an evaluation.

    Raises:
        ConfigError: A batch has one sample.
    """
    most = -(-batching.global_batch // (workers * batching.accumulate))
    batches = chain.from_iterable(evaluation_batches(len(data.val), most, rank, workers) for rank in range(workers))
    if all(len(batch) != 1 for batch in batches):
        return
    try:
        send_blank(model, _trial_inputs(data, 1))
    except UnfitImageError as error:
        raise ConfigError(
            f"{name} cannot evaluate one {data.noun[:-1]} ({error}), but an evaluation leaves a worker "
            f"one: {len(data.val):,} {data.noun} in batches of {most}; change --batch-size or the number of workers"
        ) from None


def _step_of_one(config: TrainConfig, data: ImageData, workers: int) -> int | None:
    """Return the step of an epoch in which a worker's forward pass has one image, or None."""
    if config.parallel.sync_bn and workers > 1:
        return None  # batch norm over all workers takes any number of images
    batching = plan_batches(config, workers)
    sharding = build_sharding(config, data, batching, 0, workers)
    steps = min(sharding.steps_per_epoch, config.max_steps or sharding.steps_per_epoch)
    return next((step for step in (0, steps - 1) if sharding.smallest_pass(step) == 1), None)
