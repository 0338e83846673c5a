"""The command that continues a run, as its user would type it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lockstep.config.run_paths import COMMAND, how_to_resume, is_training, typed_command

RUN = Path("runs/a b")


def _resume(arguments: str, is_launched: bool = False, **environment: str) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", arguments.split())
        patch.delenv(COMMAND, raising=False)
        for name, value in environment.items():
            patch.setenv(name, value)
        return how_to_resume(RUN, is_launched)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("/bin/lockstep train digits -np 1", "lockstep train digits -np 1 --run-dir 'runs/a b' --resume auto"),
        ("/x/lockstep/__main__.py train digits", "python -m lockstep train digits --run-dir 'runs/a b' --resume auto"),
        ("lockstep train --resume auto -b 4", "lockstep train -b 4 --run-dir 'runs/a b' --resume auto"),
        ("lockstep train --resume -b 4", "lockstep train -b 4 --run-dir 'runs/a b' --resume auto"),
        ("lockstep train -r old -b 4", "lockstep train -b 4 --run-dir 'runs/a b' --resume auto"),
        ("lockstep train --resume=old -b 4", "lockstep train -b 4 --run-dir 'runs/a b' --resume auto"),
        ("lockstep train --run_dir a -b 4", "lockstep train -b 4 --run-dir 'runs/a b' --resume auto"),
        ("lockstep train --start-epoch 2 -b 4", "lockstep train -b 4 --run-dir 'runs/a b' --resume auto"),
        ("lockstep train --pretrained x", "lockstep train --pretrained x --run-dir 'runs/a b' --resume auto"),
    ],
)
def test_a_process_that_was_typed_names_its_own_command(arguments: str, expected: str) -> None:
    assert _resume(arguments) == f"to resume: {expected}"


def test_a_worker_names_what_was_typed_at_its_launcher() -> None:
    typed = "lockstep run -np 2 -- lockstep train digits --resume auto"
    told = _resume("lockstep train digits --resume auto", is_launched=True, **{COMMAND: typed})
    assert told == "to resume: lockstep run -np 2 -- lockstep train digits --run-dir 'runs/a b' --resume auto"


def test_under_another_launcher_the_command_is_not_known() -> None:
    told = _resume("lockstep train", is_launched=True)
    assert told == "to resume: the same command with --run-dir 'runs/a b' --resume auto"


def test_a_function_is_called_again() -> None:
    assert _resume("train.py -b 4") == "to resume, call fit() with run_dir='runs/a b', resume='auto'"
    assert _resume("train.py", is_launched=True, **{COMMAND: "lockstep run python train.py"}).endswith("resume='auto'")


def test_training_is_recognized_however_it_is_started() -> None:
    for command in (
        "lockstep train",
        "/bin/lockstep train x",
        "python -m lockstep train",
        "/l/lockstep/__main__.py train",
    ):
        assert is_training(command.split())
    for command in ("lockstep eval train", "python train.py", "lockstep", "train lockstep"):
        assert not is_training(command.split())


def test_what_was_typed_is_quoted_for_the_shell() -> None:
    assert typed_command(["/bin/lockstep", "train", "my folder"]) == "lockstep train 'my folder'"
