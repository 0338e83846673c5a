"""All errors about arguments have one form: one line, with the argument, its value and the fix, and exit code 2."""

from __future__ import annotations

import pytest

from lockstep.cli import argument_errors, main


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("train --epoch 3", "--epoch: unknown argument; did you mean --epochs?"),
        ("train --nosuch=3", "--nosuch: unknown argument; `lockstep train --help` lists the arguments"),
        ("train digits cifar10", "cifar10: unknown argument; `lockstep train --help` lists the arguments"),
        ("train --epochs x", "--epochs x: must be a whole number"),
        ("train --lr 0,1", "--lr 0,1: must be a number"),
        ("train --epochs", "--epochs needs a value: INT"),
        ("train -b 0", "--batch-size must be 1 or more; got 0"),
        ("train --optimizer adm", "--optimizer adm: must be sgd, adam, adamw, lars or lamb; did you mean adam?"),
        ("train -j some", "--workers some: must be INT|auto"),
        ("train -np some", "--np some: must be N|auto"),
        ("eval", "CHECKPOINT is missing; `lockstep eval --help` lists the arguments"),
        ("watch --interval 0", "--interval must be above 0 seconds; got 0"),
        ("script sge -- true", "sge: must be slurm, pbs or lsf"),
        ("study predict --np=0", "--np takes numbers of workers, 1 or more, such as --np 16,64,256; got 0"),
        ("run", "there is no command to run; put it after the flags: lockstep run -np 2 -- python train.py"),
    ],
)
def test_an_error_is_one_line(words: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = words.split()
    assert main(command) == 2
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", f"lockstep {command[0]}: error: {line}\n")


def test_a_tyro_that_cannot_be_asked_still_refuses(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(argument_errors, "events", None)
    with pytest.raises(SystemExit, match="2"):
        main(["train", "--epochs", "x"])
    assert "--epochs" in capsys.readouterr().err
