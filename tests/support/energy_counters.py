"""Folders like / with energy counters, for tests."""

from __future__ import annotations

from pathlib import Path

RANGE = 65_712_999_613  # microjoules, as in max_energy_range_uj of an EPYC


def write_counters(root: Path, files: dict[str, object]) -> Path:
    """Write files below a root folder; return it."""
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{content}\n")
    return root


def rapl(zone: str, name: str, microjoules: int = 1_000_000) -> dict[str, object]:
    """Return the files of a RAPL zone, such as intel-rapl:0."""
    folder = f"sys/class/powercap/{zone}"
    return {
        f"{folder}/name": name,
        f"{folder}/energy_uj": microjoules,
        f"{folder}/max_energy_range_uj": RANGE,
    }


def cray(**joules: int) -> dict[str, object]:
    """Return the files of Cray's pm_counters, whose lines have a unit and a time."""
    return {f"sys/cray/pm_counters/{name}": f"{value} J 1700000000 us" for name, value in joules.items()}


def hwmon(number: int, driver: str, **microjoules: int) -> dict[str, object]:
    """Return the files of an hwmon driver whose counters have these labels."""
    folder = f"sys/class/hwmon/hwmon{number}"
    files: dict[str, object] = {f"{folder}/name": driver}
    for index, (label, value) in enumerate(microjoules.items(), start=1):
        files |= {f"{folder}/energy{index}_label": label, f"{folder}/energy{index}_input": value}
    return files
