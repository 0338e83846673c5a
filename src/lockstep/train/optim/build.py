"""Build the configured optimizer, set its rate, and clip gradients."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn, optim
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from lockstep.config.schema import OptimConfig
from lockstep.errors import ConfigError
from lockstep.models.optimizer_state import stepping
from lockstep.train.optim.lamb import LAMB
from lockstep.train.optim.lars import LARS, LayerwiseOptimizer
from lockstep.train.optim.muon import MuonAdamW
from lockstep.train.strategies import Strategy
from lockstep.world import accelerator


def freeze(model: nn.Module, patterns: Sequence[str]) -> tuple[nn.Module, ...]:
    """Freeze the parameters that match a pattern: a parameter name, a module name, or a glob of parameter names.

    Returns:
        The frozen batch norms. Keep them in evaluation mode to freeze their statistics, too.

    Raises:
        ConfigError: A pattern matches nothing, or no parameter is left to train.
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
    if not any(parameter.requires_grad for parameter in named.values()):
        raise ConfigError(
            "the model has no trainable parameters: all have requires_grad=False or are frozen by --freeze"
        )
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


FUSED = (optim.SGD, optim.Adam, optim.AdamW)
"""Optimizers with a fused implementation in torch, which can skip a step by a flag on the device."""


def build_optimizer(model: nn.Module, config: OptimConfig, strategy: Strategy) -> Optimizer:
    """Build an optimizer over the trainable parameters; without `decay_all`, norms and biases have no weight decay."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # Weights of norms and all biases are vectors; other weights have two or more dimensions.
    spared = [parameter for parameter in parameters if parameter.ndim < 2 and not config.decay_all]
    decayed = [parameter for parameter in parameters if parameter.ndim >= 2 or config.decay_all]
    groups = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": spared, "weight_decay": 0.0},
    ]
    kind, settings = _kind(config)
    if kind is MuonAdamW:
        groups = [part for group in groups for part in _by_shape(group)]
    if kind in FUSED and all(p.is_floating_point() and accelerator.overlaps(p.device) for p in parameters):
        settings["fused"] = True
    return strategy.build_optimizer(kind, [group for group in groups if group["params"]], settings)


def _by_shape(group: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a parameter group as one of matrices and one of vectors."""
    parts: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for parameter in group["params"]:
        parts[parameter.ndim >= 2].append(parameter)
    return [{**group, "params": parameters, "is_matrix": is_matrix} for is_matrix, parameters in parts.items()]


def _kind(config: OptimConfig) -> tuple[type[Optimizer], dict[str, Any]]:
    """Return the class and the settings of the optimizer.

    Raises:
        ConfigError: This torch does not have it.
    """
    if config.optimizer == "muon" and not hasattr(optim, "Muon"):
        raise ConfigError(f"--optimizer muon needs torch 2.9, but this is torch {torch.__version__}; update it")
    betas = (config.momentum, 0.999)
    kinds: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
        "sgd": (optim.SGD, {"momentum": config.momentum, "nesterov": config.nesterov and config.momentum > 0}),
        "adam": (optim.Adam, {"betas": betas}),
        "adamw": (optim.AdamW, {"betas": betas}),
        "lars": (LARS, {"momentum": config.momentum}),
        "lamb": (LAMB, {"betas": betas}),
        "muon": (MuonAdamW, {"betas": betas, "momentum": config.momentum, "nesterov": config.nesterov}),
    }
    kind, settings = kinds[config.optimizer]
    return kind, {"lr": config.lr, **settings}


def set_rate(optimizer: Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def takes_found_inf(optimizer: Optimizer) -> bool:
    """Return whether the optimizer can skip a step on the device, by `step_unless`."""
    steps = stepping(optimizer)
    return isinstance(steps, LayerwiseOptimizer) or bool(getattr(steps, "_step_supports_amp_scaling", False))


def step_unless(optimizer: Optimizer, found_inf: torch.Tensor) -> None:
    """Take a step that has no effect if `found_inf` (float32, a scalar on the device) is 1."""
    steps: Any = stepping(optimizer)
    if isinstance(steps, optim.SGD):
        _start_momentum(steps)
    steps.grad_scale, steps.found_inf = None, found_inf  # as in torch's GradScaler
    try:
        optimizer.step()
    finally:
        del steps.grad_scale, steps.found_inf


def take_back(optimizer: Optimizer) -> None:
    """Correct the host's step counts after the last `step_unless` had no effect."""
    steps = stepping(optimizer)
    if isinstance(steps, LayerwiseOptimizer):
        steps.take_back()


def _start_momentum(optimizer: optim.SGD) -> None:
    """Create the momentum buffers, which a skipped first step would leave uninitialized (torch 2.15)."""
    for group in optimizer.param_groups:
        for parameter in group["params"] if group["momentum"] else ():
            if parameter.grad is not None and optimizer.state[parameter].get("momentum_buffer") is None:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def gradients_of(optimizer: Optimizer) -> list[torch.Tensor]:
    """Return the gradients of the optimizer's parameters that have one."""
    return [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


def clip_gradients(optimizer: Optimizer, largest_norm: float) -> None:
    """Scale all gradients down to a total norm of at most `largest_norm`, computed in float32."""
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    norm = nn.utils.get_total_norm([p.grad.float() if p.grad.dtype == torch.float16 else p.grad for p in parameters])
    nn.utils.clip_grads_with_norm_(parameters, largest_norm, norm)
