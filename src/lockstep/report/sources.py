"""Find the runs and studies for a report in the paths that the user passes.

Missing or damaged inputs give warnings. It is an error only if no path has any records.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lockstep.errors import ConfigError, plural
from lockstep.files.jsonl import read_records
from lockstep.report.run import Run, by_data_set, distinct_names
from lockstep.report.run_folder import METRICS, describe_damage, read_run

DEEPEST = 4  # levels of folders below a path
SKIPPED = ("checkpoints", "logs", "io")  # folders of a run without metrics
RUN_KINDS = ("run", "step", "epoch")


@dataclass(frozen=True)
class Material:
    """The inputs of a report.

    Args:
        runs: Runs, sorted by data set, then in the order of the paths; names are distinct within a data set.
        studies: The records of all studies, in the order of the paths and of the files.
        warnings: Missing, damaged or skipped inputs, one line each.
    """

    runs: Sequence[Run] = ()
    studies: Sequence[Mapping[str, Any]] = ()
    warnings: Sequence[str] = ()

    def of_kind(self, kind: str) -> list[Mapping[str, Any]]:
        return [record for record in self.studies if record["kind"] == kind]


def gather(paths: Iterable[Path], purpose: str = "report") -> Material:
    """Read runs and studies from run folders, .jsonl files, and folders of these.

    Raises:
        ConfigError: No path has any records; the message gives the reason for each path.
    """
    finder = _Finder()
    for path in paths:
        finder.search(path)
    if not finder.runs and not finder.studies:
        raise ConfigError(
            f"nothing to {purpose}: " + "; ".join(finder.warnings) + "; docs/howto/report.md lists what is read"
        )
    runs = [
        replace(run, name=name)
        for group in by_data_set(finder.runs).values()
        for run, name in zip(group, distinct_names(group), strict=True)
    ]
    return Material(runs, finder.studies, finder.warnings)


class _Finder:
    """Searches paths for runs and studies and reads each of them once."""

    def __init__(self) -> None:
        self.runs: list[Run] = []
        self.studies: list[Mapping[str, Any]] = []
        self.warnings: list[str] = []
        self._warn = self.warnings.append
        self._seen: set[Path] = set()

    def search(self, path: Path) -> None:
        warned = len(self.warnings)
        files = list(self._files_in(path)) if os.path.isdir(path) else [path]
        for file in files:
            try:
                self._read_file(file)
            except FileNotFoundError:
                self._warn(f"{file} does not exist")
            except OSError as error:
                self._warn_of(error, file)
        if not files and len(self.warnings) == warned:
            self._warn(f"{path}: skipped, as it has no {METRICS} and no .jsonl files")

    def _warn_of(self, error: OSError, path: Path | None = None) -> None:
        self._warn(f"cannot read {path or error.filename}: {error.strerror or error}")

    def _files_in(self, folder: Path) -> Iterator[Path]:
        """Yield the files of records in a folder and those below it; a run has no others than its metrics."""
        for place, folders, names in os.walk(folder, onerror=self._warn_of, followlinks=True):
            below = len(Path(place).relative_to(folder).parts) < DEEPEST and METRICS not in names
            folders[:] = sorted(each for each in folders if below and each not in SKIPPED and not each.startswith("."))
            found = [METRICS] if METRICS in names else sorted(name for name in names if name.endswith(".jsonl"))
            yield from (path for name in found if (path := Path(place, name)).is_file())

    def _read_file(self, path: Path) -> None:
        if path.name == METRICS or next(read_records(path), {}).get("kind") in RUN_KINDS:
            self._read(path, self._read_run_folder)
        else:
            self._read(path, lambda path: self.studies.extend(read_study(path, self._warn)))

    def _read(self, path: Path, read: Callable[[Path], None]) -> None:
        if path.resolve() not in self._seen:
            self._seen.add(path.resolve())
            read(path)

    def _read_run_folder(self, metrics: Path) -> None:
        if run := read_run(metrics, self._warn):
            self.runs.append(run)


KINDS = ("scaling", "batch", "loading")


def read_study(path: Path, warn: Callable[[str], None]) -> list[dict[str, Any]]:
    """Return the records of a study's .jsonl file that the report can draw; `warn` is called once for each problem."""
    found: list[dict[str, Any]] = []
    damaged: list[int] = []
    others = 0  # counted, not kept: the file may be a large data set
    try:
        for record in read_records(path, damaged.append):
            if record.get("kind") in KINDS:
                found.append(record)
            else:
                others += 1
    except OSError as error:
        warn(f"cannot read {path}: {error.strerror or error}")
        return []
    if others:
        warn(f"{path}: skipped {plural(others, 'record')} of a kind that the report does not draw")
    elif not found:
        warn(f"{path} has no records, which are one JSON object per line (docs/reference/run-folder.md)")
        return []
    if damaged:
        warn(describe_damage(path, damaged))
    return found
