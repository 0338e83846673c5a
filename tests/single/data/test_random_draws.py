"""Random numbers by position."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from lockstep.data.random_draws import Draws

SAMPLES = np.arange(20_000, dtype=np.int64)
STREAMS = [(seed, epoch, purpose) for seed in (0, 1, 2**63) for epoch in (0, 1, 89) for purpose in ("flip", "crop x")]


def _uniform(stream: tuple[int, int, str], samples: npt.NDArray[np.int64] = SAMPLES) -> npt.NDArray[np.float64]:
    seed, epoch, purpose = stream
    return Draws(seed, epoch, samples).uniform(purpose)


def _dependence(a: npt.NDArray[np.float64], b: npt.NDArray[np.float64]) -> float:
    """Chi-square of the pairs on a grid of 10 x 10: 99 degrees of freedom, 161 is passed once in ten thousand."""
    counts = np.histogram2d(a, b, bins=10, range=((0, 1), (0, 1)))[0]
    expected = len(a) / 100
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("stream", STREAMS)
def test_draws_are_uniform(stream: tuple[int, int, str]) -> None:
    """Kolmogorov and Smirnov's distance; this bound is passed once in a thousand streams."""
    values = np.sort(_uniform(stream))
    assert values[0] >= 0
    assert values[-1] < 1
    steps = np.arange(len(values) + 1) / len(values)
    distance = max((steps[1:] - values).max(), (values - steps[:-1]).max())
    assert distance < 1.95 / np.sqrt(len(values))


def test_neighboring_samples_are_independent() -> None:
    for stream in STREAMS:
        values = _uniform(stream)
        assert _dependence(values[0::2], values[1::2]) < 161
        assert _dependence(values[:-256:2], values[256::2]) < 161


def test_another_purpose_epoch_or_seed_gives_independent_numbers() -> None:
    """Adjacent seeds and epochs are what people use."""
    base = (5, 7, "shift rows")
    others = [(5, 7, "shift columns"), (5, 7, "flip"), (5, 8, "shift rows"), (6, 7, "shift rows"), (7, 5, "shift rows")]
    for other in others:
        assert _dependence(_uniform(base), _uniform(other)) < 161
        assert _dependence(_uniform(base)[:-1], _uniform(other)[1:]) < 161


def test_a_sample_has_the_same_draws_in_any_batch() -> None:
    stream = (3, 4, "flip")
    whole = _uniform(stream)
    for samples in ([17], [19_999, 0, 5], [5, 5, 5], []):
        picked = np.array(samples, dtype=np.int64)
        assert _uniform(stream, picked).tolist() == whole[picked].tolist()


def test_between_and_integers_fill_their_range_evenly() -> None:
    draws = Draws(0, 0, SAMPLES)
    values = draws.between("rotate", -15.0, 5.0)
    assert -15 <= values.min() < -14.99
    assert 4.99 < values.max() < 5
    numbers, counts = np.unique(draws.integers("shift rows", -2, 2), return_counts=True)
    assert numbers.tolist() == [-2, -1, 0, 1, 2]
    assert abs(counts - 4000).max() < 220  # four standard deviations
    assert set(draws.integers("constant", 3, 3).tolist()) == {3}
