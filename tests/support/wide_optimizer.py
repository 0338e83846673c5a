"""An optimizer whose state differs from its parameters in dtype, shape and form."""

from __future__ import annotations

from typing import Any

import torch


class WideOptimizer(torch.optim.Optimizer):
    """Keeps state of several kinds for bfloat16 weights, as Adafactor and 8-bit optimizers do."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state["step"] = torch.tensor(0.0)
                state["momentum"] = torch.zeros_like(parameter, dtype=torch.float32)
                state["codes"] = torch.zeros(parameter.shape, dtype=torch.uint8)
                state["nested"] = {"rows": torch.zeros(len(parameter), dtype=torch.float64), "name": "rows"}
                state["pair"] = (torch.tensor(1, dtype=torch.int64), None)
                state["list"] = [torch.zeros(2, dtype=torch.float16)]
            state["step"] += 1
            state["momentum"].mul_(0.9).add_(parameter.grad.float(), alpha=1 / 3)
            state["codes"] += 1
            state["nested"]["rows"] += 1 / 3
            parameter.add_(state["momentum"].to(parameter.dtype), alpha=-0.1)
