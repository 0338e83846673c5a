"""How much does the comparison of the workers cost that is always on in observed programs?

    python benchmarks/observer_cost.py

Two workers with one thread each hold a small network under DistributedDataParallel (two linear layers, 314 weights,
batches of 16), and then resnet18 (the form for small images, 11.2 million weights, batches of 8). A turn calls what the
observer calls in each step, without the step itself, whose time varies more than these calls take: between two
comparisons, or with a comparison in each step. By default each 100th step is compared, so a step costs the first figure
and 1/100 of the second one on average: at most 20 µs for the small network.
"""

from __future__ import annotations

from copy import deepcopy

import torch
from harness import Unit
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from workers import compare_in_workers, in_workers

from lockstep.diagnosis import flight_recorder
from lockstep.models.zoo_large import resnet18
from lockstep.script_check.state_recorder import Pace, StateRecorder
from lockstep.world import accelerator
from lockstep.world.world import World

CLASSES = 10


def main(world: World) -> None:
    small = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, CLASSES))
    for name, network, batch, compared in (
        ("small network", small, torch.randn(16, 8), 100),
        ("resnet18", resnet18(CLASSES), torch.randn(8, 3, 32, 32), 4),
    ):
        turns = {
            "between comparisons": Loop(deepcopy(network), batch, 10_000, Pace(first=10**9)).observe,
            "a comparison": Loop(deepcopy(network), batch, compared, Pace(1, 1, seconds=0.0, share=1e9)).observe,
        }
        compare_in_workers(world, f"observer_cost: {name}", turns, {}, Unit("µs per step", 1e6), rounds=25)
        world.barrier()


class Loop:
    """A loop whose step has been taken once, so that there are gradients.

    Args:
        pace: When its steps are compared.
    """

    def __init__(self, network: nn.Module, batch: torch.Tensor, steps: int, pace: Pace) -> None:
        self.states = StateRecorder(accelerator.read_later, accelerator.processor, flight_recorder.started, pace)
        self.model = DistributedDataParallel(network)
        self.states.wrapper_is_made(self.model)
        self.optimizer = torch.optim.SGD(network.parameters(), 0.01)
        self.batch, self.steps = batch, steps
        self.loss = self.model(batch).mean()
        self.loss.backward()

    def observe(self) -> int:
        """Call what the observer calls in the steps of a turn; return their number."""
        for _ in range(self.steps):
            self.states.batch_arrives(self.batch)
            self.states.backward_begins(self.loss)
            self.states.backward_ends()
            self.states.step_begins(self.optimizer)
            self.states.step_ends(self.optimizer)
            self.states.take()
        return self.steps


if __name__ == "__main__":
    in_workers(2, main)
