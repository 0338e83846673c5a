"""The compilation of the simulated device: once for all processes, and a reason where it cannot be."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from simgpu import build


def test_missing_compiler_is_the_reason_for_skipping(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(build.MissingCompilerError, match=r"needs a C\+\+ compiler, such as g\+\+"):
        build.built()


def test_errors_of_the_compiler_are_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", str(tmp_path / "compiler"))
    (tmp_path / "compiler").write_text("#!/bin/sh\necho 'expected a semicolon' >&2\nexit 1\n")
    (tmp_path / "compiler").chmod(0o755)
    with pytest.raises(RuntimeError, match="does not compile:\nexpected a semicolon"):
        build.built()


SLOW = """#!/bin/sh
while [ "$1" != -o ]; do shift; done
echo "$2" >> "$0.log"
sleep 0.1
echo library > "$2"
"""


def test_processes_that_need_it_compile_it_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", str(tmp_path / "compiler"))
    (tmp_path / "compiler").write_text(SLOW)
    (tmp_path / "compiler").chmod(0o755)
    with ThreadPoolExecutor(3) as pool:
        found = {future.result() for future in [pool.submit(build.built) for _ in range(3)]}
    assert len((tmp_path / "compiler.log").read_text().splitlines()) == 1
    assert [path.read_text() for path in found] == ["library\n"]


def test_source_changes_the_key(tmp_path: Path) -> None:
    (tmp_path / "device.cpp").write_text("int main() {}")
    assert build.key_of(tmp_path) != build.key_of(build.SOURCES)
