"""Load pretrained weights, from torchvision or from a file.

Files are read without running any code in them. If the number of classes differs, the classifier's last layer keeps its
random weights; everything else must match.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lockstep.errors import CheckpointError, ConfigError, first_line
from lockstep.models import registry, saved_weights
from lockstep.models.buffers import load_state
from lockstep.models.saved_weights import bare, few, find_weights, match_names

Download = Callable[..., None]  # of torch.hub.download_url_to_file's form
Tensors = OrderedDict[str, torch.Tensor]  # like state_dict(): may have `_metadata` with the modules' versions
# torchvision's GoogLeNet and Inception v3 weights include auxiliary classifiers, which Lockstep does not build.
AUXILIARY = ("aux1.", "aux2.", "AuxLogits.")


def load_published(arch: str, model: nn.Module, whole: bool = False, download: Download | None = None) -> str:
    """Load torchvision's pretrained weights, from torch's cache or from the network.

    Args:
        whole: Reject a different number of classes.

    Returns:
        A one-line description of what was loaded.

    Raises:
        ConfigError: torchvision has no weights for this model.
        CheckpointError: The download failed; the message says where to put the file.
    """
    name = arch.removeprefix("torchvision/")
    if not (name in registry.torchvision_names() and type(model).__module__.startswith("torchvision.")):
        small = f" for small images; use --arch torchvision/{name}, or" if name in registry.torchvision_names() else ";"
        raise ConfigError(
            f"--pretrained default: torchvision has no weights for {arch}{small} pass a file: --pretrained FILE"
        )
    from torchvision import models

    weights = models.get_model_weights(name).DEFAULT
    path = Path(torch.hub.get_dir()) / "checkpoints" / Path(weights.url).name
    if not path.exists():
        _fetch(weights.url, path, download or torch.hub.download_url_to_file)
    tensors = read_tensors(path)
    for key in list(tensors):
        tensor = tensors.pop(key)
        if not key.startswith(AUXILIARY):
            tensors[modern_name(key)] = tensor
    return f"starting from torchvision's {weights}{_fit(model, tensors, path, whole)}"


def load_own(path: Path, model: nn.Module, whole: bool = False) -> str:
    """Load weights from a file; see `read_tensors`.

    Args:
        whole: Reject a different number of classes.

    Returns:
        A one-line description of what was loaded.

    Raises:
        CheckpointError: The file is missing, damaged or unsafe, or does not match the model.
    """
    return f"starting from {path}{_fit(model, read_tensors(path), path, whole)}"


def read_tensors(path: Path) -> Tensors:
    """Read weights from a safetensors file, a torch.save file, an exported model, or a run folder.

    Raises:
        CheckpointError: The file is missing or damaged, or contains anything but tensors and plain values.
    """
    if path.is_dir():
        path = path / "model.safetensors"
    if not path.is_file():
        raise CheckpointError(f"--pretrained {path}: file not found")
    read = saved_weights.read_safetensors if path.suffix == ".safetensors" else saved_weights.read
    try:
        content: Any = read(path)
    except CheckpointError as error:
        raise CheckpointError(f"--pretrained {error}") from None
    _, content = find_weights(content) if isinstance(content, Mapping) else (None, {})
    if not content:
        raise CheckpointError(f"--pretrained {path}: contains no named weights")
    odd = [str(key) for key, value in content.items() if not isinstance(value, torch.Tensor)]
    if odd:
        raise CheckpointError(f"--pretrained {path}: not tensors: {few(odd, 5)}")
    tensors = OrderedDict((str(key), value) for key, value in content.items())
    if hasattr(content, "_metadata"):  # set by state_dict()
        tensors._metadata = content._metadata  # type: ignore[attr-defined]
    return tensors


def _fit(model: nn.Module, tensors: Tensors, path: Path, whole: bool) -> str:
    """Load tensors, except the last layer's if its number of classes differs; return a note about that, or ""."""
    classes = fit_tensors(model, tensors, f"--pretrained {path}: does not match the model: ", any_classes=True)
    if classes is None:
        return ""
    own, others = classes
    if whole:
        raise CheckpointError(
            f"--evaluate --pretrained {path}: the weights have {others:,} classes, but the data has {own:,}; "
            f"evaluate on data with the same classes, or train first"
        )
    return f", except {last_layer(model)}, which stays random: the model has {own:,} classes, the file {others:,}"


def fit_tensors(
    model: nn.Module, tensors: Mapping[str, torch.Tensor], refusal: str, any_classes: bool
) -> tuple[int, int] | None:
    """Load tensors into a model, whatever wrappers their names have.

    Args:
        refusal: What precedes the differences in the error's message.
        any_classes: Leave out the last layer if only its number of classes differs.

    Returns:
        The classes of the model and of the tensors, if the last layer was left out.

    Raises:
        CheckpointError: Names or shapes differ; the message lists them. The model may be partly loaded.
    """
    tensors = _with_names_of(model, tensors)
    expected, last = model.state_dict(), last_layer(model)
    differ = {key for key in expected.keys() & tensors.keys() if tensors[key].shape != expected[key].shape}
    spared = {
        key
        for key in differ
        if any_classes and key.rpartition(".")[0] == last and tensors[key].shape[1:] == expected[key].shape[1:]
    }
    fitting = OrderedDict((key, tensor) for key, tensor in tensors.items() if key not in differ)
    # Module versions, by which modules convert the names of older files.
    fitting._metadata = getattr(tensors, "_metadata", expected._metadata)  # type: ignore[attr-defined]
    missing, unknown = load_state(model, fitting, strict=False)
    problems = [
        *(
            f"{key} has shape {tuple(tensors[key].shape)}, expected {tuple(expected[key].shape)}"
            for key in sorted(differ - spared)
        ),
        # Batch norm's counters, which are missing in old files, start at 0.
        *(f"{key} is missing" for key in missing if key not in differ and not key.endswith("num_batches_tracked")),
        *(f"{key} is unknown" for key in unknown),
    ]
    if problems:
        raise CheckpointError(f"{refusal}{few(problems, 5)}")
    return (len(expected[min(spared)]), len(tensors[min(spared)])) if spared else None


def last_layer(model: nn.Module) -> str:
    """Return the name of the classifier, the last layer, as in all of torchvision's networks; "" if there is none."""
    layers = [name for name, module in model.named_modules() if isinstance(module, nn.Linear | nn.Conv2d)]
    return layers[-1] if layers else ""


def _fetch(url: str, path: Path, download: Download) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        digest = re.search(r"-([0-9a-f]{8,})\.", path.name)  # torch checks the file by the start of its SHA-256
        download(url, str(path), digest and digest[1], progress=False)
    except (OSError, RuntimeError) as error:  # RuntimeError: a wrong digest
        raise CheckpointError(
            f"--pretrained default: cannot download {url} ({first_line(error)}); download it elsewhere and put it at "
            f"{path}, or pass a file: --pretrained FILE"
        ) from None


def _with_names_of(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """Return the tensors with the model's names, and with the versions of its modules."""
    names = match_names(tensors, model)
    renamed = OrderedDict((names[key], tensor) for key, tensor in tensors.items())
    if hasattr(tensors, "_metadata"):
        versions = {bare(str(name)): version for name, version in tensors._metadata.items()}
        renamed._metadata = {  # type: ignore[attr-defined]
            name: versions[bare(name)] for name, _ in model.named_modules() if bare(name) in versions
        }
    return renamed


def modern_name(key: str) -> str:
    """Convert a name of DenseNet's older files: denselayer1.norm.1.weight to denselayer1.norm1.weight."""
    return re.sub(r"(denselayer\d+\.(?:norm|conv))\.(?=[12]\.)", r"\1", key)
