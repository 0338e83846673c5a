"""Reading text, JSON and YAML that anybody may have written: bounded in size, and whatever is wrong is a ValueError."""

from __future__ import annotations

import errno
import json
import os
import stat
from io import BufferedReader
from pathlib import Path
from typing import Any

MOST_BYTES = 64 << 20  # the manifest of a pack of ten million images takes a few; so do the class names of any set
MOST_JSON_VALUES = 2_000_000  # Python takes 0.5 s and 150 MB for so many lists; the class names of any set are fewer
MOST_DIGITS = 20  # of a JSON integer, its sign included; 64 bits have as many
MOST_YAML_NODES = 20_000
MOST_YAML_DEPTH = 50
MOST_YAML_INTEGER = 1 << 64
MOST_YAML_DIGITS = 100  # of such integers, signs and underscores included; 64 bits are the longest
MOST_YAML_BYTES = 1 << 18  # PyYAML takes a second for that; a configuration has a few thousand


def open_plain(path: Path) -> BufferedReader:
    """A plain file, open for reading.

    Raises:
        OSError: It cannot be opened.
        ValueError: It is a pipe or device, whose opening or reading may never end.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise ValueError("it is not a regular file")


def read_bytes(path: Path, most_bytes: int = MOST_BYTES) -> bytes:
    """The content of a plain file.

    Raises:
        OSError: It cannot be read.
        ValueError: It is larger than `most_bytes`, or a pipe or device, whose reading may never end.
    """
    with open_plain(path) as file:
        size_bytes = os.fstat(file.fileno()).st_size
        content = file.read(size_bytes + 1) if size_bytes <= most_bytes else b""
    if max(len(content), size_bytes) > most_bytes:
        raise ValueError(f"it has more than {most_bytes:,} bytes")
    return content


def read_text(path: Path, most_bytes: int = MOST_BYTES) -> str:
    """The content of a plain file of UTF-8.

    Raises:
        OSError: It cannot be read.
        ValueError: It is larger than `most_bytes`, no text, or a pipe or device.
    """
    try:
        return read_bytes(path, most_bytes).decode()
    except UnicodeDecodeError:
        raise ValueError("it is not UTF-8 text") from None


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: It is none, has too many values, is nested too deeply, or has an integer beyond 64 bits.
    """
    text = text if isinstance(text, str) else text.decode()
    if sum(map(text.count, ",[{")) > MOST_JSON_VALUES:  # before memory is taken for them
        raise ValueError(f"it has more than {MOST_JSON_VALUES:,} values")
    try:
        return _JSON.decode(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _integer(digits: str) -> int:
    if len(digits) > MOST_DIGITS:  # those of some hundred digits become no float, either
        raise ValueError(f"it has an integer of more than 64 bits: {digits[:MOST_DIGITS]}...")
    return int(digits)


_JSON = json.JSONDecoder(parse_int=_integer)


def read_json(path: Path, most_bytes: int = MOST_BYTES) -> Any:
    """The value in a JSON file; raises as `read_bytes` and `parse_json` do."""
    return parse_json(read_bytes(path, most_bytes))


def parse_yaml(text: str | bytes) -> Any:
    """The value of a YAML text of plain values. Its aliases count as what they stand for, which can be gigabytes.

    Raises:
        ValueError: It is none, too long, nested too deeply, has an integer beyond 64 bits, or asks for what is no plain
            value.
    """
    import yaml

    class Plain(yaml.SafeLoader):
        nodes = 0

        def compose_node(self, parent: Any, index: Any) -> Any:
            before, is_alias = self.nodes, self.check_event(yaml.AliasEvent)
            self.nodes += not is_alias
            node = super().compose_node(parent, index)
            if is_alias and node not in sizes:
                raise ValueError("it has an alias that refers to itself")
            self.nodes += sizes[node] if is_alias else 0
            if self.nodes > MOST_YAML_NODES:
                raise ValueError(f"it has more than {MOST_YAML_NODES:,} values")
            sizes.setdefault(node, self.nodes - before)
            return node

        def fetch_flow_collection_start(self, token: Any) -> None:
            if self.flow_level >= MOST_YAML_DEPTH:  # PyYAML's time grows with its square
                raise ValueError("it is nested too deeply")
            super().fetch_flow_collection_start(token)

        def add_indent(self, column: int) -> bool:
            if len(self.indents) >= MOST_YAML_DEPTH:
                raise ValueError("it is nested too deeply")
            return bool(super().add_indent(column))

        def construct_yaml_int(self, node: Any) -> int:
            is_long = len(str(node.value)) > MOST_YAML_DIGITS
            value = 0 if is_long else int(super().construct_yaml_int(node))
            if is_long or abs(value) > MOST_YAML_INTEGER:  # Python refuses to write some of them in decimal digits
                raise ValueError(f"it has an integer of more than 64 bits: {str(node.value)[:20]}...")
            return value

    Plain.add_constructor("tag:yaml.org,2002:int", Plain.construct_yaml_int)
    sizes: dict[Any, int] = {}
    if len(text) > MOST_YAML_BYTES:
        raise ValueError(f"it has more than {MOST_YAML_BYTES:,} bytes")
    try:
        return yaml.load(text, Plain)  # a SafeLoader
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except ValueError:
        raise
    except Exception as error:  # PyYAML's constructors raise several types on malformed values
        raise ValueError(f"it contains a malformed value ({error!r})") from None


def read_yaml(path: Path) -> Any:
    """The value in a YAML file; raises as `read_bytes` and `parse_yaml` do."""
    return parse_yaml(read_bytes(path, MOST_YAML_BYTES))


def printable_name(name: str) -> str:
    """A file's or class's name in one line: as `printable`, with line ends and tabs written out, too."""
    return printable(name).replace("\n", "\\n").replace("\t", "\\t")


def printable(text: str) -> str:
    """A text without what would steer a terminal, such as escape sequences and changes of writing direction."""
    return "".join(
        each if each.isprintable() or each in "\n\t" else each.encode("unicode_escape").decode() for each in text
    )
