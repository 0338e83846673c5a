"""Parse sizes such as 4096, 64KiB or 1.5GB."""

from __future__ import annotations

import re

from lockstep.errors import ConfigError

BINARY = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, **BINARY}
UNITS |= {f"{unit}ib": size for unit, size in BINARY.items()}


def parse_size(text: str, flag: str) -> int:
    """Parse a size in bytes. K or KiB is 1,024 bytes, and KB 1,000; likewise M, G and T. Case is ignored.

    Raises:
        ConfigError: The text is not a size, or the size is below one byte.
    """
    matched = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    unit = matched and UNITS.get(matched[2].lower())
    if not matched or not unit or (size := int(float(matched[1]) * unit)) < 1:
        raise ConfigError(f"{flag} {text}: must be a size such as 4096, 64KiB or 1.5GB")
    return size
