"""Safe reading of untrusted text, JSON and YAML: bounded in size, and any invalid content raises ValueError."""

from __future__ import annotations

import errno
import json
import os
import stat
from io import BufferedReader
from pathlib import Path
from typing import Any

from lockstep.errors import printable

MAX_BYTES = 64 << 20  # the manifest of a pack of 10 million images takes a few MiB
MAX_JSON_VALUES = 2_000_000  # Python needs 0.5 s and 150 MB for this many lists
MAX_DIGITS = 20  # of a JSON integer, including its sign; enough for 64 bits
MAX_YAML_NODES = 20_000
MAX_YAML_DEPTH = 50
MAX_YAML_INTEGER = 1 << 64
MAX_YAML_DIGITS = 100  # of a YAML integer, including signs and underscores; enough for 64 bits in binary
MAX_YAML_BYTES = 1 << 18  # PyYAML takes 1 s for this; a configuration has a few thousand


def open_plain(path: Path) -> BufferedReader:
    """Open a regular file for reading.

    Raises:
        OSError: The file cannot be opened.
        ValueError: It is a pipe or device, on which opening or reading may block forever.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise ValueError("it is not a regular file")


def read_bytes(path: Path, most_bytes: int = MAX_BYTES) -> bytes:
    """Return the content of a regular file.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is larger than `most_bytes`, or a pipe or device.
    """
    with open_plain(path) as file:
        size_bytes = os.fstat(file.fileno()).st_size
        content = file.read(size_bytes + 1) if size_bytes <= most_bytes else b""
    if max(len(content), size_bytes) > most_bytes:
        raise ValueError(f"it has more than {most_bytes:,} bytes")
    return content


def read_text(path: Path) -> str:
    """Return the content of a UTF-8 text file; raise as `read_bytes` does, and ValueError for other content."""
    try:
        return read_bytes(path).decode()
    except UnicodeDecodeError:
        raise ValueError("it is not UTF-8 text") from None


def parse_json(text: str | bytes) -> Any:
    """Parse JSON text.

    Raises:
        ValueError: It is not valid JSON, has too many values, is nested too deeply, or has an integer over 64 bits.
    """
    text = text if isinstance(text, str) else text.decode()
    if sum(map(text.count, ",[{")) > MAX_JSON_VALUES:  # before allocating memory for them
        raise ValueError(f"it has more than {MAX_JSON_VALUES:,} values")
    try:
        return _JSON.decode(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:  # several hundred digits overflow a float, too
        raise ValueError(f"it has an integer of more than 64 bits: {digits[:MAX_DIGITS]}...")
    return int(digits)


_JSON = json.JSONDecoder(parse_int=_integer)


def read_json(path: Path) -> Any:
    """Parse a JSON file; raises as `read_bytes` and `parse_json` do."""
    return parse_json(read_bytes(path))


def parse_yaml(text: str | bytes) -> Any:
    """Parse YAML text of plain values. An alias counts as many values as its target, which bounds the expanded size.

    Raises:
        ValueError: It is not valid YAML, too long, nested too deeply, or has an integer over 64 bits or a value that is
            not plain.
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
            if self.nodes > MAX_YAML_NODES:
                raise ValueError(f"it has more than {MAX_YAML_NODES:,} values")
            sizes.setdefault(node, self.nodes - before)
            return node

        def fetch_flow_collection_start(self, token: Any) -> None:
            if self.flow_level >= MAX_YAML_DEPTH:  # PyYAML's time grows with the square of the depth
                raise ValueError("it is nested too deeply")
            super().fetch_flow_collection_start(token)

        def add_indent(self, column: int) -> bool:
            if len(self.indents) >= MAX_YAML_DEPTH:
                raise ValueError("it is nested too deeply")
            return bool(super().add_indent(column))

        def construct_yaml_int(self, node: Any) -> int:
            is_long = len(str(node.value)) > MAX_YAML_DIGITS
            value = 0 if is_long else int(super().construct_yaml_int(node))
            if is_long or abs(value) > MAX_YAML_INTEGER:  # Python refuses to print very long ones in decimal
                raise ValueError(f"it has an integer of more than 64 bits: {str(node.value)[:20]}...")
            return value

    Plain.add_constructor("tag:yaml.org,2002:int", Plain.construct_yaml_int)
    sizes: dict[Any, int] = {}
    if len(text) > MAX_YAML_BYTES:
        raise ValueError(f"it has more than {MAX_YAML_BYTES:,} bytes")
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
    """Parse a YAML file; raises as `read_bytes` and `parse_yaml` do."""
    return parse_yaml(read_bytes(path, MAX_YAML_BYTES))


def printable_name(name: str) -> str:
    """Escape a file or class name for one line: as `printable`, with newlines and tabs escaped, too."""
    return printable(name).replace("\n", "\\n").replace("\t", "\\t")
