"""Starting from trained weights: those that torchvision publishes, or a file of the user's.

Files are read as tensors alone, never as programs. Where the number of classes differs, the classifier's last layer
keeps its random weights; everything else must fit.
"""

from __future__ import annotations

import pickle
import re
import warnings
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from lockstep.errors import CheckpointError, ConfigError, first_line
from lockstep.models import registry

Tensors = OrderedDict[str, torch.Tensor]  # as torch has them: `_metadata`, if there, has the versions of the modules
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
    tensors = read_tensors(path)
    for key in list(tensors):
        tensor = tensors.pop(key)
        if not key.startswith(AUXILIARY):
            tensors[_modern(key)] = tensor
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
    tensors = OrderedDict((_bare(key), value) for key, value in content.items())
    if hasattr(content, "_metadata"):  # as state_dict() has it
        tensors._metadata = {_bare(key): value for key, value in content._metadata.items()}  # type: ignore[attr-defined]
    return tensors


def fit_tensors(model: nn.Module, tensors: Tensors, path: Path) -> str:
    """Put tensors into a model, all but the last layer's if its number of classes is another.

    Returns:
        What to say of the last layer: "" if it was loaded as well.

    Raises:
        CheckpointError: Names or shapes differ elsewhere; the message names them. The model may be half loaded.
    """
    expected, last = model.state_dict(), _last_layer(model)
    differ = {key for key in expected.keys() & tensors.keys() if tensors[key].shape != expected[key].shape}
    spared = {  # whose number of classes differs, and nothing else
        key for key in differ if key.rpartition(".")[0] == last and tensors[key].shape[1:] == expected[key].shape[1:]
    }
    fitting = OrderedDict((key, tensor) for key, tensor in tensors.items() if key not in differ)
    # The versions of its modules, by which they rename what older files have.
    fitting._metadata = getattr(tensors, "_metadata", expected._metadata)  # type: ignore[attr-defined]
    missing, unknown = model.load_state_dict(fitting, strict=False)
    problems = [
        *(f"{key} is {tuple(tensors[key].shape)}, not {tuple(expected[key].shape)}" for key in sorted(differ - spared)),
        # Batch norm's counters, which old files lack, start at 0.
        *(f"{key} is missing" for key in missing if key not in differ and not key.endswith("num_batches_tracked")),
        *(f"{key} is unknown" for key in unknown),
    ]
    if problems:
        raise CheckpointError(f"--pretrained {path}: does not fit the model: {_few(problems)}")
    if not spared:
        return ""
    classes, others = (len(parts[min(spared)]) for parts in (expected, tensors))
    return f", but {last} stays random: it has {classes:,} classes here and {others:,} there"


def _last_layer(model: nn.Module) -> str:
    """The name of the layer that gives the logits: the last one, as every network of torchvision's has it."""
    layers = [name for name, module in model.named_modules() if isinstance(module, nn.Linear | nn.Conv2d)]
    return layers[-1] if layers else ""


def _read_torch(path: Path) -> Any:
    try:
        with warnings.catch_warnings(action="ignore"):  # of a pickle that is refused anyway
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        wanted = re.search(r"GLOBAL (\S+)", str(error))
        if not wanted:
            raise CheckpointError(f"--pretrained {path}: cannot be read; it is no file that torch.save wrote") from None
        raise CheckpointError(
            f"--pretrained {path}: refused, for reading it would run {wanted[1]}; if you trust it, load it yourself "
            f"and save the state_dict() alone"
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


def _bare(name: str) -> str:
    """A parameter's or module's name without DistributedDataParallel's prefix."""
    return "" if name == "module" else str(name).removeprefix("module.")


def _modern(key: str) -> str:
    """A name of DenseNet's older files, such as denselayer1.norm.1.weight, as it is today: denselayer1.norm1.weight."""
    return re.sub(r"(denselayer\d+\.(?:norm|conv))\.(?=[12]\.)", r"\1", key)


def _few(words: list[str]) -> str:
    more = f" and {len(words) - 5} more" if len(words) > 5 else ""
    return f"{', '.join(words[:5])}{more}"
