"""The optimizer of a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn, optim

from lockstep.config import OptimConfig


def build_optimizer(model: nn.Module, config: OptimConfig) -> optim.Optimizer:
    """SGD, Adam or AdamW over the parameters that want gradients, in two groups where norms and biases are spared."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # Norms' weights and all biases are vectors; what a layer multiplies with has two dimensions or more.
    spared = [parameter for parameter in parameters if parameter.ndim < 2 and not config.decay_all]
    decayed = [parameter for parameter in parameters if parameter.ndim >= 2 or config.decay_all]
    groups = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": spared, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if config.optimizer == "sgd":
        nesterov = config.nesterov and config.momentum > 0
        return optim.SGD(groups, lr=config.lr, momentum=config.momentum, nesterov=nesterov)
    kind = optim.AdamW if config.optimizer == "adamw" else optim.Adam
    return kind(groups, lr=config.lr, betas=(config.momentum, 0.999))


def set_rate(optimizer: optim.Optimizer, rate: float) -> None:
    """Give every parameter group the learning rate of the coming step."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def load_keeping_flags(optimizer: optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Restore an optimizer's state, but keep what the flags of this session say, such as the weight decay."""
    configured = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    optimizer.load_state_dict(dict(state))
    for group, values in zip(optimizer.param_groups, configured, strict=True):
        group.update(values)
