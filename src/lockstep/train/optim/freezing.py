"""`--freeze`: exclude parameters from training, for fine-tuning."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from lockstep.errors import ConfigError


def freeze(model: nn.Module, patterns: Sequence[str]) -> tuple[nn.Module, ...]:
    """Freeze the parameters that match a pattern: a parameter name, a module name, or a glob of parameter names.

    Returns:
        The frozen batch norms. Keep them in evaluation mode to freeze their statistics, too.

    Raises:
        ConfigError: A pattern matches nothing.
    """
    named = dict(model.named_parameters())
    for pattern in patterns:
        matched = [parameter for name, parameter in named.items() if _matches(name, pattern)]
        if not matched:
            around = [".".join(name.split(".")[:depth]) for name in named for depth in range(1, name.count(".") + 2)]
            near = get_close_matches(pattern, dict.fromkeys(around), n=1)
            first = ", ".join(dict.fromkeys(name.partition(".")[0] for name in named))
            hint = f"did you mean {near[0]}?" if near else f"the model's modules are {first}"
            raise ConfigError(f"--freeze {pattern}: no parameter matches; {hint}")
        for parameter in matched:
            parameter.requires_grad_(False)
    norms = [
        module
        for prefix, module in model.named_modules()
        if isinstance(module, _BatchNorm) and any(_matches(f"{prefix}.weight", pattern) for pattern in patterns)
    ]
    return tuple(norms)


def _matches(name: str, pattern: str) -> bool:
    return name == pattern or name.startswith(f"{pattern}.") or fnmatchcase(name, pattern)


def describe_frozen(model: nn.Module) -> list[str]:
    """Return one line with the number of trained parameters; no line if all are trained."""
    parameters = list(model.parameters())
    total = sum(parameter.numel() for parameter in parameters)
    trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    if trained == total:
        return []
    frozen = sum(not parameter.requires_grad for parameter in parameters)
    return [f"training {trained:,} of {total:,} parameters; {frozen} of {len(parameters)} tensors are frozen"]
