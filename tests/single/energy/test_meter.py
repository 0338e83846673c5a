"""The sums of counters that wrap around, go back or fail."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest

from lockstep.energy.counters import EnergyCounter
from lockstep.energy.meter import EnergyMeter

RANGE = 65_713.0


class Counters:
    """Counters with given readings, and a clock."""

    def __init__(self, **readings: list[float | Exception]) -> None:
        self._readings: dict[str, Iterator[float | Exception]] = {name: iter(each) for name, each in readings.items()}
        self.time = 0.0

    def meter(self, span: float = 0.0) -> EnergyMeter:
        found = [
            EnergyCounter("gpu" if "gpu" in name else "cpu", name, partial(self._read, name), span, name[3:])
            for name in self._readings
        ]
        meter = EnergyMeter((found, ["CPU: a reason"]), lambda: self.time)
        meter.close()
        return meter

    def _read(self, name: str) -> float:
        value = next(self._readings[name])
        if isinstance(value, Exception):
            raise value
        return value


@pytest.mark.parametrize(
    ("readings", "interval", "span", "joules", "line"),
    [
        ([100.0, 130.0, 180.0], 1.0, 0.0, 80.0, ""),
        ([65_700.0, 20.0, 60.0], 10.0, RANGE, 73.0, ""),  # wraps around
        ([30_000.0, 5.0, 45.0], 10.0, RANGE, 40.0, "package: 10 s, in which it went back to 5 J"),  # 3.6 kW: a reset
        ([100.0, 5.0, 45.0], 10.0, 0.0, 40.0, "package: 10 s, in which it went back to 5 J"),
        ([100.0, 200.0, 300.0], 66.0, RANGE, 0.0, "package: 66 s: it may have wrapped around more than once"),
        ([100.0, 130.0, OSError("gone")], 1.0, RANGE, 30.0, "package: not counted from now on: gone"),
    ],
)
def test_what_a_counter_does_not_show_is_named_and_not_counted(
    readings: list[float | Exception], interval: float, span: float, joules: float, line: str
) -> None:
    counters = Counters(package=readings)
    meter = counters.meter(span)
    total = 0.0
    for _ in readings[1:]:
        counters.time += interval
        total += meter.take()["cpu"]
    assert total == pytest.approx(joules, rel=1e-9)
    assert set(meter.take_unread()) == {"CPU: a reason", *([line] if line else [])}
    assert meter.take_unread() == []


def test_a_gpu_counts_from_the_start_once_it_is_known() -> None:
    counters = Counters(package=[0.0, 1.0, 3.0, 6.0], gpu0=[0.0, 10.0, 30.0, 60.0], gpu1=[0.0, 100.0, 300.0, 600.0])
    meter = counters.meter()
    assert meter.take(set()) == {"cpu": 1.0}
    assert meter.take({"0"}) == {"cpu": 2.0, "gpu": 30.0}
    assert meter.take() == {"cpu": 3.0, "gpu": 630.0}


def test_the_use_of_the_gpus_in_use_is_read() -> None:
    def fails() -> float:
        raise OSError("gone")

    uses = {"0": lambda: 0.25, "1": lambda: 0.75, "2": fails, "3": None}
    meter = EnergyMeter(([EnergyCounter("gpu", name, float, 0.0, name, use) for name, use in uses.items()], []))
    assert meter.gpu_use() == [0.25, 0.75]
    assert meter.gpu_use({"1", "2", "3"}) == [0.75]
    assert meter.gpu_use(set()) == []
