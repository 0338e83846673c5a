"""Draw throughput.svg, the README's figure, from the newest record of MNIST on two workers.

python docs/figures/throughput.py
"""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

HERE = Path(__file__).parent
RECORDS = HERE.parents[1] / "benchmarks" / "records" / "throughput.jsonl"
NAME = "throughput: mnist, 2 workers"
LABELS = {
    "Lockstep": "Lockstep",
    "Fabric, its own batches": "Lightning Fabric",
    "DDP loop, its own batches": "DDP, hand-written loop",
    "Accelerate, its own batches": "Accelerate",
}
INK, GROUND, BLUE, GRAY = "#1f2328", "#f6f8fa", "#56b4e9", "#d5dae0"  # a light ground of its own, for dark pages


def main() -> None:
    """Draw the median of each contestant's rounds as a bar, with the quartiles."""
    records = map(json.loads, RECORDS.read_text().splitlines())
    record = [record for record in records if record["name"] == NAME][-1]
    rates = [record["contestants"][name]["wall"] for name in LABELS]
    plt.rcParams |= {"svg.hashsalt": "lockstep", "svg.fonttype": "none", "font.size": 11, "text.color": INK}
    figure, axes = plt.subplots(figsize=(6.4, 2.1), layout="constrained", facecolor=GROUND)
    axes.set_facecolor(GROUND)
    medians = [median for _, median, _ in rates]
    errors = [[median - low for low, median, _ in rates], [high - median for _, median, high in rates]]
    bars = axes.barh(list(LABELS.values()), medians, color=[BLUE, *[GRAY] * 3], xerr=errors, ecolor=INK, height=0.7)
    axes.bar_label(bars, [f"{median:,.0f}" for median in medians], label_type="center", weight="bold")
    axes.set_title("MNIST, 2 workers on 2 CPU cores, images/s", fontsize=11, loc="left", color=INK)
    axes.invert_yaxis()
    axes.tick_params(length=0, colors=INK)
    axes.set_xticks([])
    axes.spines[:].set_visible(False)
    figure.savefig(HERE / "throughput.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
