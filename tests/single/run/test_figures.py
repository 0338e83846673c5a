"""Means of the figures that a loop has given to `end_step`."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from lockstep.run.figures import Figures


def test_a_figure_is_the_mean_over_the_samples_of_all_workers() -> None:
    figures = Figures({"loss": [(4.0, 2.0)]})
    figures.add({"loss": torch.tensor(1.0)}, 6)
    figures.add({"loss": 9.0}, 0)  # an empty batch
    world = SimpleNamespace(gather=lambda own: [own, {"loss": ((3.0, 2.0),), "accuracy": ((0.5, 2.0),)}])
    assert figures.take(world) == {"loss": (4 * 2 + 1 * 6 + 3 * 2) / 10, "accuracy": 0.5}
    assert figures.own() == {}
