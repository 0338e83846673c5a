"""Draw throughput.svg, the README's figure, from the newest records of benchmarks/peers_table.py.

python docs/figures/throughput.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import vl_convert

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

PLAIN = {"fontWeight": "normal", "fontSize": 14, "color": INK}


def main() -> None:
    """Draw the median of each tool's rounds as a bar, with the quartiles, for each number of workers."""
    records = {record["name"]: record for record in read_records(RECORDS)}
    panels = [panel(title, records[name]["contestants"]) for title, name in NAMES.items()]
    specification = {
        "title": {"text": "ResNet-18 on photographs, 2 CPU cores, images/s", "anchor": "middle"} | PLAIN,
        "hconcat": panels,
        "background": GROUND,
        "padding": 12,
        "config": {"font": "Liberation Sans, Arial, Helvetica, sans-serif", "view": {"stroke": None}, "aria": False},
    }
    (HERE / "throughput.svg").write_text(vl_convert.vegalite_to_svg(specification) + "\n")


def panel(title: str, tools: dict[str, Any]) -> dict[str, Any]:
    """Return the bars of one number of workers."""
    note = "not measured" if title == "1 worker" else "only on GPUs"
    rows = [
        dict(zip(("low", "rate", "high"), tools[tool]["figure"], strict=True), tool=label)
        if tool in tools
        else {"tool": label, "rate": 0, "note": note}
        for tool, label in LABELS.items()
    ]
    x = {"type": "quantitative", "axis": None}
    names = {"title": None, "ticks": False, "domain": False, "labelFontSize": 14, "labelColor": INK}
    names |= {"labelLimit": 300, "labelPadding": 6, "minExtent": 170}
    tool = {"field": "tool", "sort": None, "axis": names if title == "1 worker" else None, "scale": {"padding": 0.3}}
    whisker = {"type": "rule", "color": INK, "strokeWidth": 2}
    color = {"condition": {"test": "datum.tool == 'Lockstep'", "value": BLUE}, "value": GRAY}
    rate = {"text": {"field": "rate", "type": "quantitative", "format": ".1f"}}
    text = {"type": "text", "fontSize": 14, "color": INK}
    return {
        "title": {"text": title, "anchor": "start", "frame": "group"} | PLAIN,
        "data": {"values": rows},
        "width": 270,
        "height": {"step": 32},
        "encoding": {"y": tool, "x": {"field": "rate", **x}},
        "layer": [
            {"mark": "bar", "encoding": {"color": color}},
            {"mark": whisker, "encoding": {"x": {"field": "low", **x}, "x2": {"field": "high"}}},
            {
                "transform": [{"filter": "datum.rate > 0"}, {"calculate": "datum.rate / 2", "as": "middle"}],
                "mark": {**text, "fontWeight": "bold"},
                "encoding": {"x": {"field": "middle", **x}, **rate},
            },
            {
                "transform": [{"filter": "datum.rate == 0"}],
                "mark": {**text, "align": "left", "dx": 4},
                "encoding": {"text": {"field": "note"}},
            },
        ],
    }


if __name__ == "__main__":
    main()
