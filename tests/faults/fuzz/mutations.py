"""Hostile inputs: wild bytes, and valid ones that were cut, flipped, spliced, and given unexpected values."""

from __future__ import annotations

import json
import struct
from random import Random
from typing import Any

MARKER = "<script>lockstep_fuzz</script>"
PICKLE = b"cos\nsystem\n(S'touch executed'\ntR."
HOSTILE_TEXTS = (
    *(MARKER, "'\"><img src=x onerror=lockstep_fuzz>", "../" * 12 + "etc/passwd", "/dev/zero", "canary:build", ""),
    *(
        "\x1b]0;x\x07\x1b[2J",
        "\u202e",
        "\x00",
        "\ud800",
        "x" * 70_000,
        "!!python/object/apply:os.system [touch executed]",
    ),
    *(PICKLE.decode(), "$(touch executed)", "`touch executed`", "%s%n", "node[1-9999999]", "9" * 5000, "NaN"),
    *("0x" + "f" * 10_000, "1:00:00", "1" + ":00" * 20_000),
)
HOSTILE_NUMBERS = (
    *(0, -1, 1, 1 << 31, 1 << 53, 1 << 63, (1 << 64) - 1, 10**400, 1e308, -1e308, 5e-324, 0.1),
    *(float("nan"), float("inf"), float("-inf"), True, False),
)
LENGTHS = tuple(
    struct.pack(form, number)
    for form, numbers in {
        "<I": (0, 1, 0x7FFFFFFF, 0xFFFFFFFF),
        ">I": (1, 0x7FFFFFFF, 0xFFFFFFFF),
        "<Q": (0, 1 << 20, 1 << 33, 1 << 62, (1 << 64) - 1),
        ">H": (0, 1, 0xFFFF),
    }.items()
    for number in numbers
)
SNIPPETS = (
    *(
        PICKLE,
        b"\x80\x04",
        b"[" * 5000,
        b'{"a":' * 5000,
        b"{a: " * 2000,
        b"&a [*a, *a]",
        b"\xff\xda" * 200,
        b"\xff\x01\xff\xd0\xff\xff",
        b"\n",
        b"\0" * 600,
    ),
    *(b"!!python/object/apply:os.system ['touch executed']", b"NaN", b"1e999", b"<<: *a", b"\xff", b"7777777777777"),
    *(text.encode("utf-8", "surrogatepass") for text in HOSTILE_TEXTS),
)


def _blow(rng: Random, data: bytearray) -> None:
    kind, at = rng.randrange(8), rng.randint(0, max(0, len(data) - 1))
    if kind == 0:
        del data[at:]
    elif kind == 1 and data:
        data[at] ^= 1 << rng.randrange(8)
    elif kind == 2:
        word = rng.choice(LENGTHS)
        data[at : at + len(word)] = word
    elif kind == 3:
        data[at:at] = rng.choice(SNIPPETS)
    elif kind == 4:
        data[at : at + rng.randint(1, 64)] = b""
    elif kind == 5:
        data[at:at] = data[at : at + rng.randint(1, 4096)] * rng.randint(1, 8)
    elif kind == 6:
        data[at : at + 8] = rng.randbytes(rng.randint(1, 8))
    else:
        other = rng.randint(0, max(0, len(data) - 1))
        data[at : at + 32] = data[other : other + 32]


def hostile_bytes(rng: Random, seed: bytes) -> bytes:
    """A valid input after a few blows, or none at all."""
    if rng.random() < 0.1:
        return rng.randbytes(rng.randint(0, 4096))
    data = bytearray(seed)
    for _ in range(rng.randint(1, 6)):
        _blow(rng, data)
    return bytes(data)


def _value(rng: Random, depth: int = 0) -> Any:
    kind = rng.randrange(8 if depth < 3 else 5)
    if kind < 2:
        return rng.choice(HOSTILE_TEXTS)
    if kind < 4:
        return rng.choice(HOSTILE_NUMBERS)
    if kind == 4:
        return rng.choice(([], {}, None, rng.random(), rng.getrandbits(70), chr(rng.randrange(1 << 16))))
    inner = [_value(rng, depth + 1) for _ in range(rng.randint(0, 4))]
    return inner if kind < 7 else {rng.choice(HOSTILE_TEXTS): each for each in inner}


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, each in inner for place in _places(each, (*path, key)))]


def _changed(rng: Random, tree: Any) -> Any:
    """A valid tree of values with a few of them changed, dropped, doubled or added."""
    for _ in range(rng.randint(1, 4)):
        place = rng.choice(_places(tree))
        if not place:
            if rng.randrange(10) == 0:
                return _value(rng)
            continue
        parent = tree
        for key in place[:-1]:
            parent = parent[key]
        kind = rng.randrange(5)
        if kind <= 1:
            parent[place[-1]] = _value(rng)
        elif kind == 2:
            del parent[place[-1]]
        elif isinstance(parent, list):
            parent.extend(parent[: rng.randint(1, 50)])
        else:
            parent[rng.choice(HOSTILE_TEXTS)] = _value(rng)
    return tree


def hostile_json(rng: Random, seed: bytes) -> bytes:
    """A valid JSON text, or lines of it, with values changed, or with its bytes."""
    if rng.random() < 0.3:
        return hostile_bytes(rng, seed)
    try:
        json.loads(seed)
        texts = [seed]
    except ValueError:
        texts = seed.splitlines(keepends=True)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(texts))
        value = _changed(rng, json.loads(texts[at]))
        texts[at] = json.dumps(value, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass") + b"\n"
    return b"".join(texts)
