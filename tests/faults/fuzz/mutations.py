"""Hostile inputs: wild bytes, and valid ones that were cut, flipped, spliced, and given values that nobody expects."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

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
        b"\n",
        b"\0" * 600,
    ),
    *(b"!!python/object/apply:os.system ['touch executed']", b"NaN", b"1e999", b"<<: *a", b"\xff", b"7777777777777"),
    *(text.encode("utf-8", "surrogatepass") for text in HOSTILE_TEXTS),
)


@st.composite
def mutated_bytes(draw: Callable[..., Any], seed: bytes) -> bytes:
    """A valid input after a few blows."""
    data = bytearray(seed)
    for _ in range(draw(st.integers(1, 6))):
        kind, at = draw(st.integers(0, 7)), draw(st.integers(0, max(0, len(data) - 1)))
        if kind == 0:
            del data[at:]
        elif kind == 1 and data:
            data[at] ^= 1 << draw(st.integers(0, 7))
        elif kind == 2:
            word = draw(st.sampled_from(LENGTHS))
            data[at : at + len(word)] = word
        elif kind == 3:
            data[at:at] = draw(st.sampled_from(SNIPPETS))
        elif kind == 4:
            data[at : at + draw(st.integers(1, 64))] = b""
        elif kind == 5:
            part = bytes(data[at : at + draw(st.integers(1, 4096))])
            data[at:at] = part * draw(st.integers(1, 8))
        elif kind == 6:
            data[at : at + 8] = draw(st.binary(min_size=1, max_size=8))
        else:
            other = draw(st.integers(0, max(0, len(data) - 1)))
            data[at : at + 32] = data[other : other + 32]
    return bytes(data)


def bytes_like(seed: bytes) -> st.SearchStrategy[bytes]:
    """Hostile variants of a binary file."""
    return st.one_of(mutated_bytes(seed), mutated_bytes(seed), mutated_bytes(seed), st.binary(max_size=4096))


LEAVES = st.one_of(
    st.sampled_from(HOSTILE_TEXTS),
    st.sampled_from(HOSTILE_NUMBERS),
    st.none(),
    st.text(max_size=20),
    st.integers(),
    st.floats(),
    st.just([]),
    st.just({}),
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=6,
)


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, each in inner for place in _places(each, (*path, key)))]


@st.composite
def mutated_values(draw: Callable[..., Any], seed: Any) -> Any:
    """A valid tree of values with a few of them changed, dropped, doubled or renamed."""
    tree = json.loads(json.dumps(seed))
    for _ in range(draw(st.integers(1, 4))):
        places = _places(tree)
        place = places[draw(st.integers(0, len(places) - 1))]
        if not place:
            if draw(st.integers(0, 9)) == 0:
                return draw(VALUES)
            continue
        parent = tree
        for key in place[:-1]:
            parent = parent[key]
        kind = draw(st.integers(0, 4))
        if kind <= 1:
            parent[place[-1]] = draw(VALUES)
        elif kind == 2:
            del parent[place[-1]]
        elif isinstance(parent, list):
            parent.extend(parent[: draw(st.integers(1, 50))])
        else:
            parent[draw(st.sampled_from(HOSTILE_TEXTS) | st.text(max_size=8))] = draw(VALUES)
    return tree


def json_like(seed: bytes) -> st.SearchStrategy[bytes]:
    """Hostile variants of JSON lines: of its values as well as of its bytes."""
    try:
        kept = [seed]
        lines = [json.loads(seed)]
    except ValueError:
        kept = seed.splitlines(keepends=True)
        lines = [json.loads(line) for line in kept]

    @st.composite
    def changed(draw: Callable[..., Any]) -> bytes:
        texts = list(kept)
        for _ in range(draw(st.integers(1, 3))):
            at = draw(st.integers(0, len(lines) - 1))
            value = draw(mutated_values(lines[at]))
            texts[at] = json.dumps(value, ensure_ascii=draw(st.booleans())).encode("utf-8", "surrogatepass") + b"\n"
        return b"".join(texts)

    return st.one_of(changed(), changed(), changed(), mutated_bytes(seed), st.binary(max_size=1024))
