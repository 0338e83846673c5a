"""Limits of the system that a job reaches: one line names the limit and how to raise it."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from commands import LOCKSTEP, run


@pytest.mark.cold
def test_too_few_open_files_for_the_launcher_or_its_node_process(tmp_path: Path) -> None:
    command = shlex.join([*LOCKSTEP, "run", "-np", "4", "--", "true"])
    for files in (12, 16, 22):
        done = run(["sh", "-c", f"ulimit -n {files}; {command}"], tmp_path)
        assert done.returncode in (1, 3)
        assert done.stderr.splitlines()[-1].endswith(
            f"Too many open files: a process may open {files}; raise the limit with `ulimit -n`"
        )
        assert "Traceback" not in done.stderr


@pytest.mark.cold
def test_too_few_open_files_in_a_training(tmp_path: Path) -> None:
    (tmp_path / "greedy.py").write_text(
        "import os, torch\n"
        "from torch.utils.data import TensorDataset\n"
        "def data():\n"
        "    while True:\n"
        "        os.open('/dev/null', 0)\n"
    )
    flags = ["--data", "greedy:data", "--model", "torchvision/resnet18", "--device", "cpu"]
    done = run(["sh", "-c", f"ulimit -n 200; {shlex.join([*LOCKSTEP, 'train', *flags])}"], tmp_path)
    assert done.returncode == 1
    assert "a process may open 200; raise the limit with `ulimit -n`" in done.stderr
