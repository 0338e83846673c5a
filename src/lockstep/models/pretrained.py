"""Starting from trained weights: those that torchvision publishes, or a file of the user's.

Files are read as tensors alone, never as programs. Where the number of classes differs, the classifier's last layer
keeps its random weights; everything else must fit.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from lockstep.errors import CheckpointError, ConfigError, first_line
from lockstep.models import registry

Tensors = dict[str, torch.Tensor]
# Where training scripts keep the weights within what they save.
NESTED = ("state_dict", "model_state_dict", "model", "net")
# The weights of these two are published with auxiliary classifiers, which Lockstep leaves out.
AUXILIARY = ("aux1.", "aux2.", "AuxLogits.")


def load_published(arch: str, model: nn.Module) -> str:
    """Load the weights that torchvision publishes for a network, from torch's cache or the network.

    Returns:
        One line that says what was loaded.

    Raises:
        ConfigError: There are none for this network.
        CheckpointError: They cannot be fetched; the message says which file to put where.
    """
    name = arch.removeprefix("torchvision/")
    if not (name in registry.torchvision_names() and type(model).__module__.startswith("torchvision.")):
        hint = f"; torchvision/{name} names torchvision's own" if name in registry.torchvision_names() else ""
        raise ConfigError(
            f"--pretrained default: torchvision publishes no weights for {arch} as it is built here{hint}; "
            f"give a file: --pretrained FILE"
        )
    from torchvision import models

    weights = models.get_model_weights(name).DEFAULT
    path = Path(torch.hub.get_dir()) / "checkpoints" / Path(weights.url).name
    if not path.exists():
        _fetch(weights.url, path)
    tensors = {_modern(key): tensor for key, tensor in read_tensors(path).items() if not key.startswith(AUXILIARY)}
    return f"starting from torchvision's {weights}{fit_tensors(model, tensors, path)}"


def load_own(path: Path, model: nn.Module) -> str:
    """Load the weights of a file; see `read_tensors`.

    Returns:
        One line that says what was loaded.

    Raises:
        CheckpointError: The file is missing, damaged or refused, or does not fit the model.
    """
    return f"starting from {path}{fit_tensors(model, read_tensors(path), path)}"


def read_tensors(path: Path) -> Tensors:
    """The weights in a file: safetensors, an exported model or run folder of Lockstep, or what torch.save wrote.

    Names lose the prefix `module.` of DataParallel and DistributedDataParallel.

    Raises:
        CheckpointError: There is no such file, it is damaged, or it holds more than tensors and plain values.
    """
    if path.is_dir():
        path = path / "model.safetensors"
    if not path.is_file():
        raise CheckpointError(f"--pretrained {path}: there is no such file")
    try:
        content = load_file(path) if path.suffix == ".safetensors" else _read_torch(path)
    except (OSError, SafetensorError, RuntimeError, EOFError, ValueError, KeyError) as error:
        raise CheckpointError(f"--pretrained {path}: cannot be read ({first_line(error)})") from None
    for key in NESTED:
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
            break
    if not isinstance(content, Mapping) or not content:
        raise CheckpointError(f"--pretrained {path}: holds no weights by name")
    odd = [str(key) for key, value in content.items() if not isinstance(value, torch.Tensor)]
    if odd:
        raise CheckpointError(f"--pretrained {path}: {_few(odd)} are no tensors")
    return {str(key).removeprefix("module."): value for key, value in content.items()}


def fit_tensors(model: nn.Module, tensors: Tensors, path: Path) -> str:
    """Put tensors into a model, all but the last layer's if its number of classes is another.

    Returns:
        What to say of the last layer: "" if it was loaded as well.

    Raises:
        CheckpointError: Names or shapes differ elsewhere; the message names them. The model may be half loaded.
    """
    expected = model.state_dict()
    last = _last_layer(model)
    other_shape = {
        key for key, value in tensors.items() if key in expected and value.shape != expected[key].shape
    }
    spared = {key for key in other_shape if key.rpartition(".")[0] == last and _differs_in_classes(key, tensors, model)}
    # Counters that old files lack; batch norm starts them at 0.
    missing = {key for key in expected.keys() - tensors.keys() if not key.endswith("num_batches_tracked")}
    problems = [
        *(f"{key} is missing" for key in sorted(missing)),
        *(f"{key} is unknown" for key in sorted(tensors.keys() - expected.keys())),
        *(
            f"{key} is {tuple(tensors[key].shape)}, not {tuple(expected[key].shape)}"
            for key in sorted(other_shape - spared)
        ),
    ]
    if problems:
        raise CheckpointError(f"--pretrained {path}: does not fit the model: {_few(problems)}")
    model.load_state_dict({key: value for key, value in tensors.items() if key not in spared}, strict=False)
    if not spared:
        return ""
    classes, others = (len(parts[min(spared)]) for parts in (expected, tensors))
    return f", but {last} stays random: it has {classes:,} classes here and {others:,} there"


def _last_layer(model: nn.Module) -> str:
    """The name of the layer that gives the logits: the last one, as every network of torchvision's has it."""
    return [name for name, module in model.named_modules() if isinstance(module, nn.Linear | nn.Conv2d)][-1:][0]


def _differs_in_classes(key: str, tensors: Tensors, model: nn.Module) -> bool:
    """Whether a tensor of the last layer has another number of classes and is else the same."""
    return tensors[key].shape[1:] == model.state_dict()[key].shape[1:]


def _read_torch(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"--pretrained {path}: refused, for it holds more than tensors, which reading would run, or is no file of "
            f"torch ({first_line(error)}); save the model's state_dict() alone, best with safetensors"
        ) from None


def _fetch(url: str, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        digest = re.search(r"-([0-9a-f]{8,})\.", path.name)  # torch checks the file by the start of its SHA-256
        torch.hub.download_url_to_file(url, str(path), digest and digest[1], progress=False)
    except (OSError, RuntimeError) as error:  # the latter of a wrong digest
        raise CheckpointError(
            f"--pretrained default: {url} cannot be fetched ({first_line(error)}); fetch it where there is a network "
            f"and put it at {path}, or name a file: --pretrained FILE"
        ) from None


def _modern(key: str) -> str:
    """A name of DenseNet's older files, such as denselayer1.norm.1.weight, as it is today: denselayer1.norm1.weight."""
    return re.sub(r"(denselayer\d+\.(?:norm|conv))\.(?=[12]\.)", r"\1", key)


def _few(words: list[str]) -> str:
    more = f" and {len(words) - 5} more" if len(words) > 5 else ""
    return f"{', '.join(words[:5])}{more}"
