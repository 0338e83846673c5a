"""What a node process imports, often from a file system that all hosts of a job read at the same time."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.cold
def test_node_process_imports_few_of_our_modules() -> None:
    code = "import sys, lockstep.launch.node.__main__; print(*(name for name in sys.modules if 'lockstep' in name))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert len(done.stdout.split()) <= 45, done.stdout
