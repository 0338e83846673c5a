"""Draws the tutorial's pictures as SVG files beside this script.

    python docs/figures/tutorial.py

The ring is simulated, and the gradients are those of the tutorial's own network, so neither is drawn from memory. Each
picture has a light ground of its own, for pages that are dark, and is narrow, for telephones.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from matplotlib.axes import Axes
from matplotlib.patches import Circle, FancyArrowPatch, FancyBboxPatch, Rectangle

HERE = Path(__file__).parent
INK, MUTED, GROUND = "#1f2328", "#59636e", "#f6f8fa"
WORKERS = ("#56b4e9", "#e69f00", "#8fd0b8")
BLUE, ORANGE, GREEN, GREY = "#0072b2", "#d55e00", "#009e73", "#d5dae0"

plt.rcParams |= {
    "svg.hashsalt": "lockstep",
    "font.size": 11,
    "text.color": INK,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "savefig.facecolor": GROUND,
    "axes.facecolor": GROUND,
}


def canvas(width: float, height: float) -> Axes:
    """An empty picture whose units are tenths of an inch."""
    figure = plt.figure(figsize=(width / 10, height / 10))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(0, height))
    axes.axis("off")
    return axes


def box(
    axes: Axes, left: float, bottom: float, width: float, height: float, text: str = "", color: str = "white"
) -> None:
    style = "round,pad=0,rounding_size=0.8"
    axes.add_patch(FancyBboxPatch((left, bottom), width, height, style, facecolor=color, edgecolor=INK, linewidth=1))
    axes.text(left + width / 2, bottom + height / 2, text, ha="center", va="center", linespacing=1.3)


def arrow(
    axes: Axes, begin: tuple[float, float], end: tuple[float, float], color: str = INK, curve: float = 0.0
) -> None:
    shape = {"arrowstyle": "-|>", "mutation_scale": 13, "connectionstyle": f"arc3,rad={curve}"}
    axes.add_patch(FancyArrowPatch(begin, end, color=color, linewidth=1.6, shrinkA=0, shrinkB=0, **shape))


def replicas() -> None:
    """A global batch, its shards, the replicas and the mean of their gradients."""
    axes = canvas(46, 47)
    axes.text(23, 45, "one global batch of 8 samples", ha="center", va="center")
    for sample in range(8):
        worker, place = sample % 2, sample // 2
        axes.add_patch(Rectangle((7 + 4 * sample, 39.5), 4, 3.6, facecolor=WORKERS[worker], edgecolor=INK))
        axes.text(9 + 4 * sample, 41.2, str(sample), ha="center", va="center")
        left = 4 + 24 * worker
        axes.add_patch(Rectangle((left + 3.5 * place, 31.5), 3.5, 3.4, facecolor=WORKERS[worker], edgecolor=INK))
        axes.text(left + 3.5 * place + 1.75, 33.1, str(sample), ha="center", va="center")
    for worker in range(2):
        middle = 11 + 24 * worker
        arrow(axes, (18 + 10 * worker, 39.2), (middle, 35.3))
        axes.text(middle, 29.8, f"shard of worker {worker}", ha="center", va="center", color=MUTED)
        box(axes, middle - 9.5, 21.5, 19, 6.5, f"replica {worker}\nthe same weights")
        arrow(axes, (middle, 21.2), (middle, 17.9))
        axes.text(middle + 0.9, 19.7, f"gradient $g_{worker}$", ha="left", va="center", fontsize=10)
        arrow(axes, (middle, 11.7), (middle, 8.4))
        box(axes, middle - 9.5, 1.7, 19, 6.5, f"replica {worker}\nthe same new weights")
    box(axes, 1.5, 12, 43, 5.7, r"all-reduce: both get $(g_0 + g_1)\,/\,2$", "#cfe8dc")
    save(axes, "replicas")


def simulate_ring(size: int) -> list[tuple[list[list[set[int]]], list[tuple[int, int]]]]:
    """Whose numbers each worker's chunks hold before the first step and after each, and which chunks just arrived."""
    held = [[{worker} for _ in range(size)] for worker in range(size)]
    states: list[tuple[list[list[set[int]]], list[tuple[int, int]]]] = [([list(chunks) for chunks in held], [])]
    for step in range(2 * (size - 1)):
        sent = [(worker, (worker - step) % size) for worker in range(size)]
        moved = [((worker + 1) % size, chunk, set(held[worker][chunk])) for worker, chunk in sent]
        for target, chunk, whose in moved:
            held[target][chunk] = held[target][chunk] | whose
        states.append(([list(chunks) for chunks in held], [(target, chunk) for target, chunk, _ in moved]))
    assert all(chunk == set(range(size)) for chunks in held for chunk in chunks)
    return states


def ring() -> None:
    """Ring all-reduce of three workers, step by step."""
    axes = canvas(46, 52)
    states = simulate_ring(3)
    names = [("start", ""), ("step 1", "add"), ("step 2", "add"), ("step 3", "copy"), ("step 4", "copy")]
    for worker in range(3):
        axes.text(14.2 + 12.2 * worker, 50, f"worker {worker}", ha="center", va="center")
    for row, (held, arrived) in enumerate(states):
        bottom = 40 - 9 * row
        name, what = names[row]
        axes.text(0.8, bottom + 3.4, name, ha="left", va="center")
        axes.text(0.8, bottom + 1.2, what, ha="left", va="center", fontsize=10, color=MUTED)
        for worker, chunks in enumerate(held):
            for chunk, whose in enumerate(chunks):
                left = 8.8 + 12.2 * worker + 3.6 * chunk
                new = (worker, chunk) in arrived
                full = len(whose) == 3
                face = "#cfe8dc" if full else "white"
                edge, width = (ORANGE, 2.6) if new else (MUTED, 0.8)
                patch = Rectangle((left, bottom), 3.6, 5.2, facecolor=face, edgecolor=edge, linewidth=width)
                patch.set_zorder(3 if new else 2)
                axes.add_patch(patch)
                for owner in whose:
                    spot = (left + 1.8, bottom + 4.25 - 1.65 * owner)
                    axes.add_patch(Circle(spot, 0.68, facecolor=WORKERS[owner], edgecolor=INK, linewidth=0.7, zorder=4))
        if row == 0:
            for chunk in range(9):
                left = 10.6 + 12.2 * (chunk // 3) + 3.6 * (chunk % 3)
                axes.text(left, bottom + 6.2, "ABC"[chunk % 3], ha="center", va="center", fontsize=10, color=MUTED)
    save(axes, "ring")


def overlap() -> None:
    """A step whose gradients travel after the backward pass, and one where they travel during it."""
    axes = canvas(46, 37)
    forward, layer, travel, last = 7.0, 4.0, 3.6, 2.0

    def bar(begin: float, width: float, bottom: float, color: str, text: str, ink: str = INK) -> None:
        axes.add_patch(Rectangle((begin, bottom), width, 3.6, facecolor=color, edgecolor=INK, linewidth=1))
        axes.text(begin + width / 2, bottom + 1.7, text, ha="center", va="center", fontsize=10, color=ink)

    for bottom, title in ((21, "without overlap"), (4, "with overlap, bucket by bucket")):
        axes.text(1, bottom + 12.2, title, va="center", weight="bold")
        axes.text(1, bottom + 9.7, "computing", va="center", fontsize=10, color=MUTED)
        axes.text(1, bottom + 1.8, "network", va="center", fontsize=10, color=MUTED)
    begin = 1.0
    for bottom in (21, 4):
        bar(begin, forward, bottom + 4.6, GREY, "forward")
        for part in range(4):
            bar(begin + forward + layer * part, layer, bottom + 4.6, WORKERS[0], f"b{4 - part}")
    end = begin + forward + 4 * layer
    bar(end, 4 * travel, 21, WORKERS[1], "a4 a3 a2 a1")
    bar(end + 4 * travel, last, 25.6, GREEN, "", "white")
    free = 0.0
    for part in range(4):
        ready = begin + forward + layer * (part + 1)
        free = max(free, ready)
        bar(free, travel, 4, WORKERS[1], f"a{4 - part}")
        free += travel
    bar(free, last, 8.6, GREEN, "")
    saved = end + 4 * travel + last
    axes.plot([free + last] * 2, [3.2, 13.2], color=MUTED, linewidth=1, linestyle=":")
    axes.annotate(
        "", (free + last, 5.8), (saved, 5.8), arrowprops={"arrowstyle": "<|-|>", "color": INK, "linewidth": 1.2}
    )
    axes.text((free + last + saved) / 2, 3.9, "saved", ha="center", va="center")
    axes.plot([saved] * 2, [3.2, 30.2], color=MUTED, linewidth=1, linestyle=":")
    axes.text(1, 1.2, "b: backward, a: all-reduce", va="center", color=MUTED, fontsize=10)
    axes.add_patch(Rectangle((26.3, 0.3), 1.6, 1.8, facecolor=GREEN, edgecolor=INK, linewidth=1))
    axes.text(28.5, 1.2, "the optimizer's step", va="center", color=MUTED, fontsize=10)
    save(axes, "overlap")


def data_parallel() -> None:
    """What travels in one step of nn.DataParallel."""
    axes = canvas(46, 48)
    axes.add_patch(
        FancyBboxPatch((0.8, 0.8), 44.4, 42.2, "round,pad=0,rounding_size=1", facecolor="white", edgecolor=MUTED)
    )
    axes.text(23, 45.4, "one process, a thread for each GPU, one lock (GIL)", ha="center", va="center")
    box(axes, 2.2, 2.5, 14, 38.5, "", WORKERS[1])
    axes.text(9.2, 38.3, "GPU 0", ha="center", va="center", weight="bold")
    for height, text in (
        (31.5, "the weights,\nthe optimizer"),
        (22.5, "the batch"),
        (14.5, "all outputs,\nthe loss"),
        (7, "summed\ngradients"),
    ):
        axes.text(9.2, height, text, ha="center", va="center", fontsize=10, linespacing=1.3)
    for index, bottom in enumerate((29, 15.8, 2.5), start=1):
        box(axes, 34, bottom, 10, 12, f"GPU {index}\n\na copy for\none step", WORKERS[0])
        axes.texts[-1].set_fontsize(10)
    labels = ("1  weights", "2  its samples", "3  outputs", "4  gradients")
    for number, (text, color) in enumerate(zip(labels, (BLUE, BLUE, ORANGE, ORANGE), strict=True)):
        height = 39.2 - 2.9 * number
        begin, end = ((16.7, height), (33.6, height)) if number < 2 else ((33.6, height), (16.7, height))
        arrow(axes, begin, end, color)
        axes.text(25, height + 1.1, text, ha="center", va="center", fontsize=10, color=color)
    for bottom in (15.8, 2.5):
        for number, color in enumerate((BLUE, BLUE, ORANGE, ORANGE)):
            height = bottom + 10.2 - 2.7 * number
            begin, end = ((16.7, height), (33.6, height)) if number < 2 else ((33.6, height), (16.7, height))
            arrow(axes, begin, end, color)
    save(axes, "data-parallel")


def gradient_magnitudes() -> torch.Tensor:
    """The absolute gradients of every step of epoch 5 of the tutorial's first script; zeros are left out."""
    sys.path.insert(0, str(HERE.parents[1] / "examples" / "tutorial"))
    from task import build_model, load_digits

    images, labels = load_digits()[0].tensors
    model, generator, magnitudes = build_model(), torch.Generator(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    for epoch in range(5):
        order = torch.randperm(len(images), generator=generator.manual_seed(epoch))
        for batch in order.split(64)[:-1]:
            optimizer.zero_grad()
            F.cross_entropy(model(images[batch]), labels[batch]).backward()
            if epoch == 4:
                magnitudes += [weight.grad.abs().flatten() for weight in model.parameters() if weight.grad is not None]
            optimizer.step()
    found = torch.cat(magnitudes)
    return found[found > 0]


def fp16() -> None:
    """What fp16 can hold, and where gradients lie, as they are and times the loss scale."""
    powers = gradient_magnitudes().log2()
    figure, axes = plt.subplots(figsize=(4.6, 4.4))
    figure.subplots_adjust(left=0.05, right=0.97, top=0.9, bottom=0.14)
    low, normal, high = -25.0, -14.0, math.log2(65504)
    axes.axvspan(-45, low, color="#f4d3c5", linewidth=0)
    axes.axvspan(low, normal, color="#fbe9c9", linewidth=0)
    axes.axvspan(normal, high, color="#d7ecdf", linewidth=0)
    axes.axvspan(high, 24, color="#f4d3c5", linewidth=0)
    for shift, color in ((0, BLUE), (16, ORANGE)):
        shares, edges = torch.histogram(powers + shift, bins=75, range=(-45.0, 30.0))
        axes.stairs((shares / len(powers)).tolist(), edges.tolist(), color=color, linewidth=2)
    top = axes.get_ylim()[1] * 1.42
    axes.set(xlim=(-42, 24), ylim=(0, top), yticks=[])
    axes.set_xticks([-40, -24, -14, 0, 16], [f"$2^{{{power}}}$" for power in (-40, -25, -14, 0, 16)])
    axes.set_xlabel("magnitude of a gradient, one of 38,282 a step")
    for middle, text in (
        ((-42 + low) / 2, "becomes 0"),
        ((low + normal) / 2, "loses\ndigits"),
        ((normal + high) / 2, "fp16 holds it\nto 11 bits"),
        ((high + 24) / 2, "∞"),
    ):
        axes.text(middle, top * 0.93, text, ha="center", va="center", fontsize=10, linespacing=1.2)
    axes.text(-13.5, top * 0.60, "as they are", ha="right", color=BLUE)
    axes.text(3.5, top * 0.74, "times 65,536", ha="center", color=ORANGE)
    below = float((powers < -25).float().mean())
    axes.set_title(f"{below:.1%} of these gradients are 0 in fp16 as they are", fontsize=11)
    for side in ("left", "top", "right"):
        axes.spines[side].set_visible(False)
    save(axes, "fp16")


def save(axes: Axes, name: str) -> None:
    """Without the date, which would change with each run."""
    axes.figure.savefig(HERE / f"tutorial-{name}.svg", metadata={"Date": None})
    plt.close("all")


PICTURES: tuple[Callable[[], None], ...] = (replicas, ring, overlap, data_parallel, fp16)

if __name__ == "__main__":
    for draw in PICTURES:
        draw()
