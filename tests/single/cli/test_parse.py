"""All errors about arguments have one form: one line, with the argument, its value and the fix, and exit code 2."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import pytest

from lockstep.cli import horovodrun, main
from lockstep.cli.parse import read
from lockstep.config.flags import Positional, arg


@pytest.mark.parametrize(
    ("words", "line"),
    [
        # Unknown
        ("train --epoch 3", "--epoch: unknown flag; did you mean --epochs?"),
        ("train --nosuch=3", "--nosuch: unknown flag; `lockstep train --help` lists the arguments"),
        ("train --no-nesterow", "--no-nesterow: unknown flag; did you mean --no-nesterov?"),
        ("eval run --precison bf16", "--precison: unknown flag; did you mean --precision?"),
        ("predict run x.png -Z", "-Z: unknown flag; `lockstep predict --help` lists the arguments"),
        # Missing and left over
        ("train --epochs", "--epochs needs a value: INT"),
        ("train --run-dir --quiet", "--run-dir needs a value: PATH"),
        ("run -H", "-H needs a value: HOST:SLOTS,..."),
        ("eval", "missing CHECKPOINT; `lockstep eval --help` lists the arguments"),
        ("data pack images", "missing OUT; `lockstep data pack --help` lists the arguments"),
        ("predict run", "missing IMAGE; give the run or checkpoint, then images: lockstep predict RUN IMAGE"),
        ("run", "missing COMMAND; add it after the flags: lockstep run -np 2 -- python train.py"),
        ("train digits cifar10", "cifar10: unexpected argument; `lockstep train --help` lists the arguments"),
        ("models extra", "extra: unexpected argument; `lockstep models --help` lists the arguments"),
        # Of another type
        ("train --epochs x", "--epochs x: must be a whole number"),
        ("train --epochs=", "--epochs '': must be a whole number"),
        ("train -b 1.5", "-b 1.5: must be a whole number"),
        ("train --lr 0,1", "--lr 0,1: must be a number"),
        ("train --lr-milestones 30 x", "--lr-milestones x: must be a number"),
        ("train -j some", "-j some: must be a whole number or auto"),
        ("train -np some", "-np some: must be a whole number or auto"),
        ("train --loss-scale big", "--loss-scale big: must be a number or dynamic"),
        ("train --optimizer adm", "--optimizer adm: must be sgd, adam, adamw, lars, lamb or muon; did you mean adam?"),
        ("export run --format onx", "--format onx: must be safetensors, torch or onnx; did you mean onnx?"),
        ("script sge -- true", "sge: must be slurm, pbs, lsf or flux"),
        ("run --dry-run=x -- true", "--dry-run=x: --dry-run takes no value"),
        # Out of range
        ("train -b 0", "-b 0: batch size must be at least 1"),
        ("train --batch-size 0", "--batch-size 0: must be at least 1"),
        ("train --batch_size 0", "--batch_size 0: batch size must be at least 1"),
        ("train --lr-final -1", "--lr-final -1: must be at least 0"),
        ("train --lr-milestones 3 2", "--lr-milestones 3 2: must be at least 0 and in ascending order"),
        ("doctor --stop-timeout -1", "--stop-timeout -1: must be above 0 seconds"),
        ("train --wd -1", "--wd -1: weight decay must be at least 0"),
        ("train --lr nan", "--lr nan: must be above 0"),
        ("train --zoom 1", "--zoom 1: must be at least 0 and below 1"),
        ("train -j -1", "-j -1: workers must be at least 0"),
        ("train -np 0", "-np 0: must be at least 1"),
        ("train --time-limit soon", "--time-limit soon: must be FORMS, or none"),
        ("run --max-restarts -1 -- true", "--max-restarts -1: must be at least 0"),
        ("watch --interval 0", "--interval 0: must be above 0 seconds"),
        ("data verify images -j 0", "-j 0: jobs must be at least 1, or auto"),
        ("script slurm --time 5 -- true", "--time '5': must be [D-]HH:MM:SS, such as 12:00:00 or 2-00:00:00"),
        ("study batch --first 8 --last 4 -- digits", "--last 4: must be at least --first 8"),
        *((f"study predict --np={each}", f"--np {each}: must be numbers of workers, such as 1,2,4") for each in "0x,"),
        ("study predict --np=-3", "--np -3: must be numbers of workers, such as 1,2,4"),
        ("study predict --from=1.5", "--from 1.5: must be numbers of workers, such as 1,2,4"),
        ("study loading -- --batch-size 0", "--batch-size 0: must be at least 1"),
        ("train --run-dir= --max-steps 1", "--run-dir '': must be a path"),
        *(
            (f"train --run-dir {each}", f"--run-dir {each}: is the root of the file system; ...")
            for each in ("/", "/usr/..")
        ),
        ("check", "missing COMMAND; add it after the flags: lockstep check -- python train.py"),
        ("check -np 1 -- python", "-np 1: must be at least 2: one worker has no others to agree with"),
        ("check --invariance 3 -- python {batch}", "--invariance 3: must be a multiple of 2 workers"),
        ("check --json --steps 0 -- python", "--steps 0: must be at least 1"),
        ("check --invariance 4 -- python", "--invariance needs {batch} in the command, such as: -- python ..."),
        (
            "check -- python -b{batch}",
            "{batch} in the command needs --invariance N, the samples per step of all workers",
        ),
        (
            "script slurm",
            "missing COMMAND; add it after --, for example: lockstep script slurm --nodes 2 -- lockstep ...",
        ),
        ("script slurm --gpus-per-node 4 -np 1 -- true", "1 worker and 4 GPUs per node, but a worker has one GPU; ..."),
        ("explain", "missing the records to explain; for example: lockstep explain steps study/scaling.jsonl"),
        ("explain steps -- python", "python: a command after -- is for --try; add it, or remove the command"),
        ("explain --try a b", "nothing to explain: a does not exist; b does not exist; docs/howto/report.md ..."),
        ("watch --interval nan", "--interval nan: must be above 0 seconds"),
        ("watch nowhere", "nowhere: no such folder; pass a run folder, or omit it for the newest run in runs/"),
        ("watch .", ".: no run found; a run folder contains config.yaml or metrics.jsonl; ..."),
        ("watch", "no runs in runs/; pass a run folder: lockstep watch RUN; ..."),
        ("doctor --json -H a,b", "--json describes this machine; run it on each host, without -H, --hostfile and ..."),
        ("doctor --nodes 2 --node-rank 0 --master-addr a", "doctor cannot be combined with --nodes or --dist-url; ..."),
        # Commands
        ("data gte", "gte: unknown action; did you mean `lockstep data get`?"),
        ("run --nproc_per_node=4 true", "--nproc_per_node: unknown flag; did you mean -np?"),
        ("run --nnodes 2 true", "--nnodes: unknown flag; did you mean --nodes?"),
        ("study nosuch", "nosuch: unknown study; must be one of scaling, predict, batch, loading"),
    ],
)
@pytest.mark.usefixtures("here")
def test_an_error_is_one_line(words: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    forms = "MINUTES, MINUTES:SECONDS, HOURS:MINUTES:SECONDS or DAYS-HOURS[:MINUTES[:SECONDS]]"
    command = words.split()
    assert main(command) == 2
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    expected = f"lockstep {command[0]}: error: {line.replace('FORMS', forms)}"
    assert said.err == f"{expected}\n" or (line.endswith(" ...") and said.err.startswith(expected[:-3]))


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("-np x true", "-np x: must be a whole number"),
        ("-np", "-np needs a value: N"),
        ("--num-prok 2 true", "--num-prok: unknown flag; did you mean --num-proc?"),
        ("--nproc-per-node 2 true", "--nproc-per-node: unknown flag; did you mean -np?"),
        ("--nosuch true", "--nosuch: unknown flag; `horovodrun --help` lists the arguments"),
        ("--log-level loud true", "--log-level loud: must be TRACE, DEBUG, INFO, WARNING, ERROR or FATAL"),
        ("-np 0 true", "-np 0: must be at least 1"),
        ("python x.py", "missing -np, the number of workers; for example -np 2"),
        ("-np 2 train.py", "train.py: command not found; to run a script, put `python` before it"),
        ("-np4", "missing COMMAND; add it after the flags: horovodrun -np 2 python train.py"),
        ("--blacklist-cooldown-range 1", "--blacklist-cooldown-range needs a value: MIN MAX"),
    ],
)
def test_an_error_of_horovodrun_is_one_line(words: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert horovodrun.main(words.split()) == 2
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", f"horovodrun: error: {line}\n")


@pytest.mark.parametrize(("word", "kind"), [("--verion", "flag"), ("nosuch", "command")])
def test_an_unknown_command_is_one_line(word: str, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([word]) == 2
    assert capsys.readouterr().err == f"lockstep: error: {word}: unknown {kind}; `lockstep --help` lists the commands\n"


@dataclass(frozen=True)
class Inner:
    side: int | None = 3
    keep: bool | None = None


@dataclass(frozen=True)
class Outer:
    name: Positional[str]
    inner: Inner = field(default_factory=Inner)
    count: Annotated[int | Literal["auto"], arg(name="number", aliases=["-n"])] = "auto"
    sizes: tuple[float, ...] = (1.0,)
    fast: bool = True
    rest: Positional[tuple[Path, ...]] = ()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("a", Outer("a")),
        ("a -n 2 --side=4", Outer("a", Inner(4), 2)),
        ("a -n2", Outer("a", count=2)),
        ("--number 2 -n auto a", Outer("a")),  # the last one counts
        ("a --sizes 1 -2 .5 --no-fast", Outer("a", sizes=(1.0, -2.0, 0.5), fast=False)),
        ("a --sizes --fast", Outer("a", sizes=())),
        ("a --sizes= b", Outer("a", sizes=(), rest=(Path("b"),))),
        ("a b -- -c --fast", Outer("a", rest=(Path("b"), Path("-c"), Path("--fast")))),
        ("a --side None --keep False", Outer("a", Inner(None, keep=False))),
    ],
)
def test_arguments_become_the_fields_of_a_dataclass(words: str, expected: Outer) -> None:
    assert read(Outer, "try", words.split()) == expected


def test_flags_that_are_not_given_have_the_values_of_the_default() -> None:
    default = Outer("b", Inner(5), 7, (2.0,), False, (Path("c"),))
    assert read(Outer, "try", [], default) == default
    assert read(Outer, "try", ["--keep", "True"], default).inner == Inner(5, keep=True)
