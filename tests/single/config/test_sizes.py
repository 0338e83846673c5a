"""Sizes in words."""

from __future__ import annotations

import pytest

from lockstep.config.sizes import parse_size
from lockstep.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4096", 4096),
        ("1K", 1024),
        ("64KiB", 65536),
        ("1.5GB", 1_500_000_000),
        ("2 MiB", 2 << 20),
        ("1kB", 1000),
        ("3m", 3 << 20),
        ("512B", 512),
    ],
)
def test_units_are_those_of_the_field(text: str, size: int) -> None:
    assert parse_size(text, "--size") == size


@pytest.mark.parametrize("text", ["", "0", "-1", "GB", "1 XB", "0.1", "1e9", "nan"])
def test_invalid_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--size .*: must be a size such as"):
        parse_size(text, "--size")
