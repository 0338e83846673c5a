"""Sizes in words: 4096, 64KiB, 1.5GB."""

from __future__ import annotations

import re

from lockstep.errors import ConfigError

UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
UNITS |= {f"{unit}iB": size for unit, size in UNITS.items() if unit}
UNITS |= {"B": 1, "KB": 10**3, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def parse_size(text: str, flag: str) -> int:
    """Bytes: K, M, G and T, also with iB, are powers of 1,024; KB, MB, GB and TB of 1,000.

    Raises:
        ConfigError: It is no such size, or below one byte.
    """
    matched = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    if not matched or matched[2] not in UNITS or (size := int(float(matched[1]) * UNITS[matched[2]])) < 1:
        raise ConfigError(f"{flag} is a size such as 4096, 64KiB or 1.5GB; got {text!r}")
    return size
