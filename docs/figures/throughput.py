"""Draw throughput.svg, the README's figure, from the newest records of benchmarks/peers_table.py.

python docs/figures/throughput.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

from lockstep.files.jsonl import read_records

HERE = Path(__file__).parent
RECORDS = HERE.parents[1] / "benchmarks" / "records" / "peers_table.jsonl"
NAMES = {
    "1 worker": "peers_table: ResNet-18 at 224, 1 worker, rate",
    "2 workers": "peers_table: ResNet-18 at 224, 2 workers, rate",
}
LABELS = {
    "lockstep train": "Lockstep",
    "DDP loop": "DDP, hand-written loop",
    "Accelerate": "Accelerate",
    "Fabric": "Lightning Fabric",
    "timm": "timm's train.py",
    "torchvision's references": "torchvision's train.py",
}
INK, GROUND, BLUE, GRAY = "#1f2328", "#f6f8fa", "#56b4e9", "#d5dae0"  # a light ground of its own, for dark pages


def main() -> None:
    """Draw the median of each tool's rounds as a bar, with the quartiles, for each number of workers."""
    records = {record["name"]: record for record in read_records(RECORDS)}
    plt.rcParams |= {"svg.hashsalt": "lockstep", "svg.fonttype": "none", "font.size": 11, "text.color": INK}
    figure, panels = plt.subplots(1, 2, figsize=(8.4, 2.8), sharey=True, layout="constrained", facecolor=GROUND)
    for axes, (title, name) in zip(panels, NAMES.items(), strict=True):
        draw(axes, title, records[name]["contestants"])
    panels[0].invert_yaxis()  # shared
    figure.suptitle("ResNet-18 on photographs, 2 CPU cores, images/s", fontsize=11, color=INK)
    figure.savefig(HERE / "throughput.svg", metadata={"Date": None})


def draw(axes: Any, title: str, tools: dict[str, Any]) -> None:
    axes.set_facecolor(GROUND)
    for tool, label in LABELS.items():
        if tool not in tools:
            axes.barh(label, 0)
            note = "not measured" if title == "1 worker" else "only on GPUs"
            axes.annotate(note, (0, label), (4, 0), textcoords="offset points", va="center", color=INK)
            continue
        low, median, high = tools[tool]["figure"]
        color = BLUE if tool == "lockstep train" else GRAY
        bar = axes.barh(label, median, xerr=[[median - low], [high - median]], color=color, ecolor=INK, height=0.7)
        axes.bar_label(bar, [f"{median:.1f}"], label_type="center", weight="bold")
    axes.set_title(title, fontsize=11, loc="left", color=INK)
    axes.tick_params(length=0, colors=INK)
    axes.set_xticks([])
    axes.spines[:].set_visible(False)


if __name__ == "__main__":
    main()
