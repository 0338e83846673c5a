"""Recognize files that are not records, to report in one line what they are and what opens them."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

from lockstep.files.jsonl import parse_record
from lockstep.files.untrusted import open_plain

HEAD_BYTES = 1 << 16
_NSIGHT = (".nsys-rep", ".qdrep", ".ncu-rep")
_RECORDS = "records, which are one JSON object per line (docs/reference/study-records.md)"
# The first pattern that matches the start of a file, without leading white space, decides.
_CONTENTS = (
    (
        rb'\{.*"traceEvents"|\[\s*\{.*"ph"\s*:',
        "a Chrome trace (torch.profiler, HOROVOD_TIMELINE); open it in https://ui.perfetto.dev "
        "(docs/reference/horovod.md)",
    ),
    (rb"\[|\{\s*\n", f"one JSON document instead of {_RECORDS}"),
    (rb"\x1f\x8b|BZh|\xfd7zXZ|\x28\xb5\x2f\xfd", "a compressed file; decompress it first"),
    (rb'PK\x03\x04|\x80[\x02-\x05]|.{6}\0\0\{"', "a checkpoint or an archive; pass the run folder"),
    (rb"\x89PNG|\xff\xd8\xff|GIF8|%PDF|<svg|<\?xml", "a figure; pass the records that it shows"),
    (rb".{0,500}\0", "a binary file"),
    (rb"(?!.*^[ \t]*\{)", f"a text file without {_RECORDS}"),
)


def describe_foreign(path: Path) -> str | None:
    """Return what a file is and what to do with it; None if it may have records, is empty or is not a regular file.

    Raises:
        OSError: The file cannot be opened.
    """
    head = b""
    with suppress(ValueError), open_plain(path) as file:  # ValueError: it is a pipe
        head = file.read(HEAD_BYTES).lstrip()
    if path.suffix in _NSIGHT:
        return "a profile, which Nsight opens"
    if not head or (parse_record(head.partition(b"\n")[0]) is not None and b'"traceEvents"' not in head):
        return None
    return next((about for pattern, about in _CONTENTS if re.match(pattern, head, re.DOTALL | re.MULTILINE)), None)
