"""Starting from trained weights: those that torchvision publishes, or a file of the user's.

Files are read as tensors alone, never as programs. Where the number of classes differs, the classifier's last layer
keeps its random weights; everything else must fit.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lockstep.errors import CheckpointError, ConfigError, first_line
from lockstep.models import registry, saved_weights
from lockstep.models.saved_weights import bare, few, find_weights, match_names

Tensors = OrderedDict[str, torch.Tensor]  # as torch has them: `_metadata`, if there, has the versions of the modules
# The weights of these two are published with auxiliary classifiers, which Lockstep leaves out.
AUXILIARY = ("aux1.", "aux2.", "AuxLogits.")


def load_published(arch: str, model: nn.Module, whole: bool = False) -> str:
    """Load the weights that torchvision publishes for a network, from torch's cache or the network.

    Args:
        whole: Refuse another number of classes.

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
    tensors = read_tensors(path)
    for key in list(tensors):
        tensor = tensors.pop(key)
        if not key.startswith(AUXILIARY):
            tensors[_modern(key)] = tensor
    return f"starting from torchvision's {weights}{fit_tensors(model, tensors, path, whole)}"


def load_own(path: Path, model: nn.Module, whole: bool = False) -> str:
    """Load the weights of a file; see `read_tensors`.

    Args:
        whole: Refuse another number of classes.

    Returns:
        One line that says what was loaded.

    Raises:
        CheckpointError: The file is missing, damaged or refused, or does not fit the model.
    """
    return f"starting from {path}{fit_tensors(model, read_tensors(path), path, whole)}"


def read_tensors(path: Path) -> Tensors:
    """The weights in a file: safetensors, an exported model or run folder of Lockstep, or what torch.save wrote.

    Raises:
        CheckpointError: There is no such file, it is damaged, or it holds more than tensors and plain values.
    """
    if path.is_dir():
        path = path / "model.safetensors"
    if not path.is_file():
        raise CheckpointError(f"--pretrained {path}: there is no such file")
    read = saved_weights.read_safetensors if path.suffix == ".safetensors" else saved_weights.read
    try:
        content: Any = read(path)
    except CheckpointError as error:
        raise CheckpointError(f"--pretrained {error}") from None
    _, content = find_weights(content) if isinstance(content, Mapping) else (None, {})
    if not content:
        raise CheckpointError(f"--pretrained {path}: holds no weights by name")
    odd = [str(key) for key, value in content.items() if not isinstance(value, torch.Tensor)]
    if odd:
        raise CheckpointError(f"--pretrained {path}: {few(odd, 5)} are no tensors")
    tensors = OrderedDict((str(key), value) for key, value in content.items())
    if hasattr(content, "_metadata"):  # as state_dict() has it
        tensors._metadata = content._metadata  # type: ignore[attr-defined]
    return tensors


def fit_tensors(model: nn.Module, tensors: Tensors, path: Path, whole: bool = False) -> str:
    """Put tensors into a model, all but the last layer's if its number of classes is another.

    Args:
        whole: Refuse another number of classes.

    Returns:
        What to say of the last layer: "" if it was loaded as well.

    Raises:
        CheckpointError: Names or shapes differ elsewhere; the message names them. The model may be half loaded.
    """
    tensors = _with_names_of(model, tensors)
    expected, last = model.state_dict(), _last_layer(model)
    differ = {key for key in expected.keys() & tensors.keys() if tensors[key].shape != expected[key].shape}
    spared = {  # whose number of classes differs, and nothing else
        key for key in differ if key.rpartition(".")[0] == last and tensors[key].shape[1:] == expected[key].shape[1:]
    }
    fitting = OrderedDict((key, tensor) for key, tensor in tensors.items() if key not in differ)
    # The versions of its modules, by which they rename what older files have.
    fitting._metadata = getattr(tensors, "_metadata", expected._metadata)  # type: ignore[attr-defined]
    classes, others = (len(parts[min(spared)]) if spared else 0 for parts in (expected, tensors))
    if spared and whole:
        raise CheckpointError(
            f"--evaluate --pretrained {path}: these weights know {others:,} classes and the data has {classes:,}; "
            f"evaluate on data of the same classes, or train first"
        )
    missing, unknown = model.load_state_dict(fitting, strict=False)
    problems = [
        *(f"{key} is {tuple(tensors[key].shape)}, not {tuple(expected[key].shape)}" for key in sorted(differ - spared)),
        # Batch norm's counters, which old files lack, start at 0.
        *(f"{key} is missing" for key in missing if key not in differ and not key.endswith("num_batches_tracked")),
        *(f"{key} is unknown" for key in unknown),
    ]
    if problems:
        raise CheckpointError(f"--pretrained {path}: does not fit the model: {few(problems, 5)}")
    if not spared:
        return ""
    return f", but {last} stays random: it has {classes:,} classes here and {others:,} there"


def _last_layer(model: nn.Module) -> str:
    """The name of the layer that gives the logits: the last one, as every network of torchvision's has it."""
    layers = [name for name, module in model.named_modules() if isinstance(module, nn.Linear | nn.Conv2d)]
    return layers[-1] if layers else ""


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


def _with_names_of(model: nn.Module, tensors: Tensors) -> Tensors:
    """The tensors under the model's names, and the versions of its modules."""
    names = match_names(tensors, model)
    renamed = OrderedDict((names[key], tensor) for key, tensor in tensors.items())
    if hasattr(tensors, "_metadata"):
        versions = {bare(str(name)): version for name, version in tensors._metadata.items()}
        renamed._metadata = {  # type: ignore[attr-defined]
            name: versions[bare(name)] for name, _ in model.named_modules() if bare(name) in versions
        }
    return renamed


def _modern(key: str) -> str:
    """A name of DenseNet's older files, such as denselayer1.norm.1.weight, as it is today: denselayer1.norm1.weight."""
    return re.sub(r"(denselayer\d+\.(?:norm|conv))\.(?=[12]\.)", r"\1", key)
