"""Which way `lockstep explain --try` takes for a change, and what it says of the measurements."""

from __future__ import annotations

import math
import os
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lockstep.cli.explain_trials import ELSEWHERE, TriedChange, Variant, describe, judge, to_mappings, variant_of
from lockstep.cli.parse import parse_train
from lockstep.cli.recorded_program import RecordedProgram, check_hosts, recorded_program
from lockstep.diagnosis.observed_steps import ProgramFacts
from lockstep.errors import ConfigError
from lockstep.launch.plan.options import LaunchOptions
from lockstep.report.measured_step import MeasuredStep
from lockstep.report.run import Curve, Run
from lockstep.report.step_changes import COMPRESS, ProposedChange, untested_changes

OWN = RecordedProgram(("python", "train.py"), LaunchOptions(), 2, 1, threads=4)


def _change(kind: str, value: int = 0, action: str = "") -> ProposedChange:
    return ProposedChange(kind, action, 0.5, 0.4, 0.6, value)


def _training(*flags: str) -> RecordedProgram:
    words = ("python", "-m", "lockstep", "train", *flags)
    return RecordedProgram(words, LaunchOptions(), 2, 1, config=parse_train(flags).job)


@pytest.mark.parametrize(
    ("flags", "change", "added"),
    [
        ("digits", _change("compress"), "--compress bf16"),
        ("digits", _change("powersgd"), "--compress powersgd"),
        ("digits --accumulate 2", _change("accumulate", 4), "--accumulate 8"),
        ("digits --global-batch-size 64", _change("accumulate", 4), "--global-batch-size 256 --accumulate 4"),
        ("digits -b 16", _change("batch", 4), "--batch-size 64"),
        ("digits --global-batch-size 64", _change("batch", 4), "--global-batch-size 256"),
        ("digits", _change("loader", 3), "--workers 3"),
        ("digits", _change("balance"), "--balance"),
        ("digits", _change("channels_last"), "--channels-last"),
        ("digits", _change("compile"), "--compile"),
        ("digits", _change("slow worker"), ""),
    ],
)
def test_training_is_changed_by_its_flags(flags: str, change: ProposedChange, added: str) -> None:
    program = _training(*flags.split())
    variant = variant_of(change, program)
    if not added:
        assert variant is None
        return
    assert variant is not None
    assert variant.program.words == (*program.words, *added.split())
    assert variant.outside == ("powersgd" if change.kind == "powersgd" else "")  # without many plain steps before
    parse_train(variant.program.words[4:])


@pytest.mark.parametrize(
    ("change", "outside"),
    [
        (_change("compress", action=COMPRESS["ddp"]), "compress"),
        (_change("compress", action=COMPRESS["hvd"]), None),
        (_change("powersgd"), "powersgd"),
        (_change("loader", 3), "loader=3"),
        (_change("pin_memory"), "pin_memory"),
        (_change("threads", 2), ""),
        (_change("accumulate", 4), None),
        (_change("slow worker"), None),
        (_change("balance"), None),
    ],
)
def test_other_programs_are_changed_from_outside(change: ProposedChange, outside: str | None) -> None:
    variant = variant_of(change, OWN)
    assert (variant and variant.outside) == outside
    assert variant is None or variant.program.threads == (2 if change.kind == "threads" else 4)


def test_a_batch_in_the_command_is_enlarged() -> None:
    variant = variant_of(_change("batch", 4), replace(OWN, batch=8))
    assert variant is not None
    assert variant.program.batch == 32


@pytest.mark.parametrize(
    ("change", "facts"),
    [
        (_change("threads", 2), {"threads": 2}),
        (_change("loader", 3), {"loader_processes": 3}),
        (_change("powersgd"), {"exchange": "ddp hook"}),
    ],
)
def test_workers_show_whether_a_change_was_made(change: ProposedChange, facts: dict[str, Any]) -> None:
    variant = variant_of(change, OWN)
    assert variant is not None
    assert variant.is_changed(ProgramFacts(**facts))
    assert not variant.is_changed(ProgramFacts(exchange="ddp", threads=4, loader_processes=0))


@pytest.mark.parametrize(
    ("savings", "said"),
    [
        ([0.5, 0.45, 0.55], "measured 50 % (45 % to 55 %)"),
        ([0.3, 0.25, 0.35], "measured 30 % (25 % to 35 %); less than predicted"),
        ([0.7, 0.65, 0.75], "measured 70 % (65 % to 75 %); more than predicted"),
        ([0.01, -0.2, 0.02], "measured 1 % (-20 % to 2 %); it does not help here"),
    ],
)
def test_a_prediction_is_compared_with_the_measurement(savings: list[float], said: str) -> None:
    assert judge(_change("compress"), savings) == f"predicted 50 % (40 % to 60 %), {said}"


def test_each_change_has_its_line() -> None:
    variant = Variant(OWN)
    trials = [
        TriedChange(None, variant, [10.0, 10.0, 20.0]),
        TriedChange(_change("compress"), variant, [20.0, 25.0, 40.0]),
        TriedChange(ProposedChange("compile", "torch.compile"), variant, [9.0, 10.0, 20.0]),
        TriedChange(_change("balance", action="balance it"), None, reason=ELSEWHERE),
    ]
    assert describe(trials) == [
        "  1. predicted 50 % (40 % to 60 %), measured 50 % (50 % to 60 %)",
        "  2. measured 0 % (-11 % to 0 %), without a prediction; it does not help: torch.compile",
        f"  3. {ELSEWHERE}: balance it",
    ]
    first, _, last = to_mappings(trials)
    assert first == {"kind": "compress", "reason": "", "gain": 0.5, "low": 0.5, "high": pytest.approx(0.6)}
    assert last == {"kind": "balance", "reason": ELSEWHERE}


def _run(command: str, **more: Any) -> Run:
    start = {"workers": 2, "hosts": 1, "program": "python train.py --name 'a b'", "command": command, **more}
    rates = {"images_per_second": 160.0, "steps_per_second": 10.0}
    return Run(
        Path("steps"), "steps", start, steps={name: Curve([1], [1], [1], [each]) for name, each in rates.items()}
    )


@pytest.mark.parametrize(
    ("command", "hosts"),
    [
        ("lockstep run -np 2 --observe-dir steps -- python train.py", None),
        ("python -m lockstep run -H a:1,b:1 --observe-dir steps python train.py", "a:1,b:1"),
        ("horovodrun -np 2 python train.py", None),
        ("train.py run", None),
    ],
)
def test_a_program_is_started_as_it_was(command: str, hosts: str | None) -> None:
    found = recorded_program(_run(command), ())
    assert found.words == ("python", "train.py", "--name", "a b")
    assert (found.where.hosts, found.workers, found.batch) == (hosts, 2, None)


def test_a_typed_command_may_have_the_batch() -> None:
    found = recorded_program(_run("lockstep run", folder="/elsewhere"), ("python", "train.py", "-b", "{batch}"))
    assert (found.words[-1], found.batch) == ("{batch}", 8)


def test_the_last_batch_of_an_epoch_is_not_the_usual_one() -> None:
    run = _run("lockstep run")
    rates = {"images_per_second": [160.0, 160.0, math.nan, 40.0], "steps_per_second": [10.0] * 4}
    run = replace(run, steps={name: Curve(*[range(4)] * 3, values) for name, values in rates.items()})
    assert recorded_program(run, ("python", "{batch}")).batch == 8


def test_a_run_of_the_trainer_is_repeated_by_its_flags(here: Path) -> None:
    command = shlex.split("/bin/lockstep train digits -np 2 --run-dir runs/a --resume auto -b 16")
    environment = {"command": command, "folder": os.getcwd()}
    found = recorded_program(Run(Path("runs/a"), "a", {"workers": 2}, environment=environment), ())
    assert found.words[1:] == ("-m", "lockstep", "train", "digits", "-np", "2", "-b", "16")
    assert found.config is not None
    assert (found.config.batch_size, found.config.run.run_dir) == (16, None)


SCRIPT = {"command": ["train.py"]}
ELSEWHERE_RUN = {"command": ["lockstep", "train"], "folder": "/elsewhere"}
REFUSED = {
    "manually started nodes": (_run("lockstep run --nodes 2 --node-rank 0 --master-addr a"), (), "with -H HOSTS"),
    "unknown samples": (replace(_run("lockstep run"), steps={}), ("python", "{batch}"), "leave it out"),
    "a script with fit": (
        Run(Path("runs/a"), "a", environment={"command": ["train.py"]}),
        (),
        "is for `lockstep train`",
    ),
    "another folder": (Run(Path("runs/a"), "a", environment=ELSEWHERE_RUN), (), "first: cd /elsewhere"),
    "another folder of a program": (_run("lockstep run", folder="/elsewhere"), (), "first: cd /elsewhere"),
    "another command": (Run(Path("runs/a"), "a", environment=ELSEWHERE_RUN), ("python",), "leave out python"),
}


@pytest.mark.parametrize(("run", "typed", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_repeated_is_refused(run: Run, typed: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        recorded_program(run, typed)


def test_other_hosts_than_recorded_are_refused() -> None:
    check_hosts(OWN, 1)
    for program, nodes in ((replace(OWN, hosts=2), 1), (OWN, 2)):
        with pytest.raises(ConfigError, match="record the job with -H HOSTS"):
            check_hosts(program, nodes)


def test_changes_without_a_prediction_are_tried() -> None:
    step = MeasuredStep({"forward": [0.1]}, None, 0.0, 20, 100, 1, ProgramFacts(loader_processes=1, device="gpu"))
    config = parse_train(["digits"]).job

    def kinds(bound: str, config: Any = None) -> list[str]:
        return [each.kind for each in untested_changes(bound, step, config) if not each.high]

    assert kinds("computing", config) == ["channels_last", "compile"]
    assert kinds("data") == ["loader", "pin_memory"]
    assert kinds("computing") == kinds("slow link", config) == []
