"""Use trained weights: evaluate checkpoints and classify images."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lockstep.config.schema import AugmentConfig, DataConfig, TrainConfig
from lockstep.data.decode import evaluation_pixels
from lockstep.data.readers import Normalizer, Placement
from lockstep.data.sets import EncodedSplit, FileSplit, ImageData, InputSpec, MemorySplit
from lockstep.errors import CheckpointError, ConfigError, plural
from lockstep.models import registry
from lockstep.models.buffers import load_state
from lockstep.models.saved_weights import few
from lockstep.models.trial_forward import UnfitImageError, send_blank
from lockstep.run.checkpoints.checkpoint_folder import load_model
from lockstep.run.checkpoints.checkpoint_format import About
from lockstep.run.checkpoints.legacy_format import OldCheckpoint, is_old, load_weights, read
from lockstep.train.guards.checks import check_evaluation, check_model
from lockstep.train.inputs import build_val_loader, load_data
from lockstep.train.metrics import Meter, evaluate
from lockstep.train.network import load_pretrained, place_model
from lockstep.train.optim.schedule import plan_batches
from lockstep.train.precision import build_precision
from lockstep.train.run_records import list_left_out
from lockstep.world.host_memory import keep_freed_memory
from lockstep.world.world import World


@dataclass(frozen=True)
class LoadedNetwork:
    """A trained model with its class names and input specification."""

    model: nn.Module
    classes: tuple[str, ...]
    input: InputSpec
    data: str


@dataclass(frozen=True)
class ImagePrediction:
    """The most probable classes of one image as (name, probability), in descending order."""

    path: Path
    classes: list[tuple[str, float]]


class MirrorAverage(nn.Module):
    """A model whose logits are the mean of those of each image and of its mirror image."""

    def __init__(self, model: nn.Module, dtype: torch.dtype):
        super().__init__()
        self._model, self._dtype = model, dtype

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return logits [N, K] in `dtype` of images [N, C, H, W]."""
        own, mirrored = (self._model(each).to(self._dtype) for each in (images, images.flip(-1)))
        return (own + mirrored) / 2  # type: ignore[no-any-return]


def load_network(path: Path, arch: str | None = None) -> LoadedNetwork:
    """Rebuild a model from an exported file, a checkpoint or a run folder, on the CPU.

    Args:
        arch: The network named by the user; None: the one named in the file, unless that is MODULE:FUNCTION.

    Raises:
        CheckpointError: The file is missing, damaged, another network, or its model cannot be built by name.
    """
    weights, metadata = load_model(path)
    if metadata.get("input", "") is None or metadata.get("classes") == []:
        raise CheckpointError(
            f"{path}: its model does not classify images; load the weights into your model with "
            f"safetensors.torch.load_file"
        )
    try:
        about = About.read(metadata)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise CheckpointError(f"{path}: invalid model metadata: {error!r}") from None
    classes, spec = about.classes, about.input
    arch = agree_on_arch(path, about.arch, arch)
    try:
        model = registry.build(arch, len(classes), spec.channels, min(spec.height, spec.width))
    except (ConfigError, TypeError) as error:
        raise CheckpointError(
            f"{path}: cannot build its model {arch} by name ({error}); load the weights into your own model with "
            f"safetensors.torch.load_file"
        ) from None
    if nan := next((name for name, tensor in weights.items() if tensor.isnan().any()), None):
        raise CheckpointError(f"{path}: {nan} contains NaN; use another checkpoint")
    dtypes = {tensor.dtype for tensor in weights.values() if tensor.is_floating_point()}
    try:
        load_state(model.double() if torch.float64 in dtypes else model, weights)
    except RuntimeError as error:
        raise CheckpointError(f"{path}: the weights do not fit {arch}: {str(error).splitlines()[-1].strip()}") from None
    return LoadedNetwork(model.float(), classes, spec, about.data)


def agree_on_arch(path: Path, named: str, given: str | None) -> str:
    """Return the network named in a file, after comparing it with the user's choice.

    Files are untrusted. MODULE:FUNCTION would be imported and called, so the user must name it explicitly.

    Raises:
        CheckpointError: The user names another network, or the file names code that the user does not name.
    """
    if given is not None and given != named:
        raise CheckpointError(f"{path} contains {named}, not -a {given}; leave out -a, or name another file")
    if given is None and ":" in named:
        raise CheckpointError(
            f"{path} names the network {named}, which is code and was not imported; if you trust it, add -a {named}"
        )
    return named


def load_old_network(old: OldCheckpoint, arch: str | None, data: ImageData) -> LoadedNetwork:
    """Rebuild a model from an older script's checkpoint, which does not record its classes and input.

    Args:
        arch: The network; None: the one named in the file.
        data: The data set whose classes, in order, and input the network is assumed to have.

    Raises:
        CheckpointError: The file names no network, or its weights do not fit.
    """
    if arch is None:
        if old.arch is None:
            raise CheckpointError(f"{old.path} does not name its network; add -a NAME (see `lockstep models`)")
        arch = agree_on_arch(old.path, old.arch, None)
    side = min(data.input.height, data.input.width)
    model = registry.build(arch, len(data.classes), data.input.channels, side)
    load_weights(old, model, arch)
    return LoadedNetwork(model, data.classes, data.input, data.name)


def evaluate_checkpoint(
    config: TrainConfig, world: World, path: Path, arch: str | None = None, tta: bool = False
) -> dict[str, Any]:
    """Evaluate a checkpoint on the validation images of a data set, each exactly once over all workers.

    Args:
        config: Names the data set; "" uses the one that the checkpoint was trained on.
        path: A checkpoint, a run folder, an exported file, or an older script's checkpoint file.
        arch: The network named by the user; None: the one named in the file.
        tta: Average the logits of each image and of its mirror image.

    Returns:
        Mean `loss`, `top1` and `top5` as fractions, the number of `samples`, and the files `left_out` because they
        cannot be decoded; equal on every worker.

    Raises:
        CheckpointError: The checkpoint is damaged, another network, or its classes or input differ from the data set's.
    """
    if is_old(path):
        old = read(path)
        if not (config.data.dataset or config.data.data):
            raise ConfigError(f"{path} does not record its training data; name the data set or folder as well")
        data = load_data(config, world)
        network = load_old_network(old, arch, data)
    else:
        network = load_network(path, arch)
        config = replace(config, data=_data_for(network, path, config.data))
        data = load_data(config, world)
    if data.classes != network.classes:
        raise CheckpointError(
            f"{path} has the classes {few(network.classes, 4)}, but {data.name} has {few(data.classes, 4)}"
        )
    expected = _shape(network.input)
    shape = data.val.images.shape[1:] if isinstance(data.val, MemorySplit) else _shape(data.input)
    if shape != expected and not isinstance(data.val, EncodedSplit):
        raise CheckpointError(f"{path} takes images of shape {expected} (C, H, W), but {data.name} has {tuple(shape)}")
    return evaluate_network(config, world, network, data, tta)


def _data_for(network: LoadedNetwork, path: Path, asked: DataConfig) -> DataConfig:
    """Return the requested data set, or else the network's, with the image size of the network.

    Raises:
        ConfigError: --image-size differs from the network's input size.
        CheckpointError: The network's data set is code that the user has not named.
    """
    _, height, width = _shape(network.input)
    if asked.image_size not in (None, height) or asked.image_size not in (None, width):
        raise ConfigError(
            f"--image-size {asked.image_size}: {path} takes images of {width} x {height} pixels; leave out --image-size"
        )
    if not (asked.dataset or asked.data):
        if ":" in network.data and not Path(network.data).is_dir():
            raise CheckpointError(
                f"{path} was trained on --data {network.data}, which is code and was not run; if you trust it, add "
                f"--data {network.data}"
            )
        asked = replace(asked, dataset=network.data)
    return replace(asked, in_memory="never", image_size=height)


def _shape(spec: InputSpec) -> tuple[int, int, int]:
    return spec.channels, spec.height, spec.width


def evaluate_pretrained(config: TrainConfig, world: World) -> dict[str, Any]:
    """Evaluate the --pretrained weights in the --arch network; returns the same as `evaluate_checkpoint`.

    Raises:
        ConfigError: No data set is named, or there are no published weights for this network.
        CheckpointError: The weights cannot be downloaded or read, or have another number of classes.
    """
    if config.model.pretrained is None or not (config.data.dataset or config.data.data):
        raise ConfigError("--evaluate --pretrained: name the data set or folder to evaluate on")
    data = load_data(config, world)
    side = min(data.input.height, data.input.width)
    model = registry.build(config.model.arch, len(data.classes), data.input.channels, side)
    load_pretrained(model, config, world, whole=True)
    return evaluate_network(config, world, LoadedNetwork(model, data.classes, data.input, data.name), data)


def evaluate_network(
    config: TrainConfig, world: World, network: LoadedNetwork, data: ImageData, tta: bool = False
) -> dict[str, Any]:
    data = replace(data, input=replace(network.input, bits=data.input.bits or network.input.bits))
    config = replace(config, augment=AugmentConfig())  # not the recipe's, which these images may not support
    check_model("the network", network.model, data)
    batching = plan_batches(config, world.size)
    check_evaluation("the network", network.model, data, batching, world.size)
    precision = build_precision(config.numerics, world.device)
    model = place_model(network.model, config, precision, world)
    model = MirrorAverage(model, precision.loss_dtype) if tta else model
    val_loader = build_val_loader(config, world, data, precision, batching)
    try:
        keep_freed_memory(world.device)
        figures = evaluate(model, val_loader, precision, Meter(world)).figures()
        return figures | {"left_out": world.union([*data.left_out, *val_loader.reader.left_out])}
    finally:
        val_loader.reader.close()


def predict(network: LoadedNetwork, paths: Sequence[Path], top: int) -> Iterator[ImagePrediction]:
    """Yield the `top` most probable classes of each image, preprocessed as in evaluation.

    Raises:
        CorruptImageError: A file cannot be decoded.
        ConfigError: The network cannot take one image.
    """
    try:
        send_blank(network.model, torch.zeros(1, *_shape(network.input), device="cpu"))
    except UnfitImageError as error:
        raise ConfigError(
            f"the network cannot take one image ({error}), as `lockstep predict` passes them; use `lockstep eval` with "
            f"-b 2 or more, or the weights in your own program"
        ) from None
    normalize = Normalizer(network.input, Placement(torch.device("cpu")))
    network.model.eval()
    split = FileSplit(paths, [0] * len(paths))
    for sample, path in enumerate(paths):
        pixels = torch.from_numpy(evaluation_pixels(split.image(sample), network.input).copy())
        with torch.inference_mode():
            logits = network.model(normalize(pixels.permute(2, 0, 1).unsqueeze(0)))
        best = logits.softmax(1)[0].topk(min(top, len(network.classes)))
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        yield ImagePrediction(path, [(network.classes[index], share) for index, share in pairs])


def summarize(figures: dict[str, Any], world: World) -> str:
    """Return one line with the results of an evaluation, and lines with the skipped files."""
    right = round(figures["top1"] * figures["samples"])
    line = (
        f"top-1 {100 * figures['top1']:.2f} % ({right:,} of {figures['samples']:,} images right), "
        f"top-5 {100 * figures['top5']:.2f} %, loss {figures['loss']:.4f}, over {plural(world.size, 'worker')}"
    )
    return "\n".join([line, *list_left_out(figures["left_out"])])
