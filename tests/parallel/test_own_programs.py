"""Scripts of several kinds that resume exactly with a few lines of Lockstep: tests/support/own_programs."""

from __future__ import annotations

import difflib
import random
import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from commands import LOCKSTEP, Done, own_environment, run

from lockstep.errors import CheckpointError, NonFiniteLossError, StoppedError
from lockstep.files.jsonl import read_records

PROGRAMS = Path(__file__).parents[1] / "support/own_programs"
NAMES = ("classifier", "gpt", "segmentation", "gan", "fsdp_text", "horovod", "spirals")
OF_OTHER_LIBRARIES = ("spirals_accelerate_before", "spirals_fabric_before")  # the program "spirals" as it was
MAX_CHANGED_LINES = 8
OF_LOCKSTEP = re.compile(r"^import lockstep$|\b(lockstep|world|run)\.(?!hvd)|\btrain\.(weight|completes_step)\b")
KILLS = 50
FROM_THE_PAGE = {  # plain scripts, migrated with the page alone, with arguments against chance
    "blobs": ("--float64",),
    "lines": ("--float64", "--dropout", "0"),
    "wgan": ("--float64", "--noise-of-samples"),
}
LINES_PER_EPOCH = {"blobs": 500, "lines": 800, "wgan": 390}
OF_ANY_SIZE = {  # with arguments that make them independent of the number of workers
    "classifier": ("--no-amp", "--sync-bn", "--float64"),
    "segmentation": ("--float64",),
    "gan": ("--float64", "--noise-of-samples"),
}


def _train(
    name: str, folder: Path, *arguments: str, size: int = 2, options: tuple[str, ...] = (), **variables: str
) -> Done:
    folder.mkdir(exist_ok=True)
    program = [sys.executable, PROGRAMS / "disturbed.py", PROGRAMS / f"{name}.py", *arguments]
    return run([*LOCKSTEP, "run", "-np", str(size), *options, "--", *program], folder, own_environment(**variables))


def _finish(name: str, folder: Path, *arguments: str, size: int = 2, **variables: str) -> None:
    done = _train(name, folder, *arguments, size=size, **variables)
    assert done.returncode == 0, done.stdout + done.stderr


def _results(folder: Path) -> tuple[list[Any], dict[str, bytes]]:
    """Return the recorded figures of each step, and the final weights and other states."""
    newest = max((folder / "runs/own/checkpoints").glob("step-*"))
    return _figures(folder), {path.name: path.read_bytes() for path in newest.glob("*.safetensors")}


def _figures(folder: Path) -> list[Any]:
    records = read_records(folder / "runs/own/metrics.jsonl")
    return [(each["step"], each["lr"], each["loss"], each.get("metrics")) for each in records if each["kind"] == "step"]


@pytest.mark.parametrize("name", NAMES)
def test_few_lines_of_a_script_use_lockstep(name: str) -> None:
    lines = [line for line in (PROGRAMS / f"{name}.py").read_text().splitlines() if OF_LOCKSTEP.search(line)]
    assert 0 < len(lines) <= MAX_CHANGED_LINES, "\n".join(lines)


@pytest.mark.parametrize("former", OF_OTHER_LIBRARIES)
def test_few_lines_of_a_script_change(former: str) -> None:
    before, after = ((PROGRAMS / f"{name}.py").read_text().splitlines() for name in (former, "spirals"))
    new = [line for line in difflib.ndiff(before, after) if line.startswith("+ ") and line[2:].strip()]
    assert 0 < len(new) <= MAX_CHANGED_LINES, "\n".join(new)


@pytest.mark.long
@pytest.mark.parametrize("name", OF_OTHER_LIBRARIES)
def test_programs_of_other_libraries_run_as_they_are(name: str, tmp_path: Path) -> None:
    done = run(
        [*LOCKSTEP, "run", "-np", "2", "--", sys.executable, PROGRAMS / f"{name}.py"], tmp_path, own_environment()
    )
    assert "epoch 1: accuracy" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("size", [1, 3])
def test_stopped_script_resumes_on_another_number_of_workers(size: int, tmp_path: Path) -> None:
    stopped = _train("spirals", tmp_path, OWN_SIGNAL="0:3:SIGTERM")
    assert stopped.returncode == StoppedError.exit_code, stopped.stderr
    resumed = _train("spirals", tmp_path, size=size)
    assert "epoch 1: accuracy" in resumed.stdout, resumed.stderr
    assert [step for step, *_ in _figures(tmp_path)] == list(range(1, 13))


def test_a_killed_script_resumes_with_the_same_bits(tmp_path: Path) -> None:  # the long form kills all of them
    name = "gpt"
    _finish(name, tmp_path / "undisturbed")
    killed = _train(name, tmp_path / "killed", OWN_SIGNAL="1:6:SIGKILL")
    assert killed.returncode not in (0, StoppedError.exit_code), killed.stderr
    _finish(name, tmp_path / "killed")
    assert _results(tmp_path / "killed") == _results(tmp_path / "undisturbed")


def test_restarted_workers_resume_from_memory(tmp_path: Path) -> None:
    name = "fsdp_text"
    _finish(name, tmp_path / "undisturbed")
    restarted = _train(name, tmp_path / "killed", options=("--max-restarts", "1"), OWN_SIGNAL="1:6:SIGKILL")
    assert restarted.returncode == 0, restarted.stderr
    resumed = re.search(r"resumed after step (\d), in epoch 1, from (.*)", restarted.stderr)
    assert resumed, restarted.stderr
    assert int(resumed[1]) == 5  # the checkpoint is of step 4
    assert not resumed[2].startswith("runs/own")
    assert _results(tmp_path / "killed") == _results(tmp_path / "undisturbed")


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", NAMES)
def test_random_kills_and_stops_change_no_bit(name: str, tmp_path: Path) -> None:
    chance, length = random.Random(name), ("--epochs", "192")  # a stop of such short steps takes up to 32 more
    _finish(name, tmp_path / "undisturbed", *length)
    for _ in range(KILLS):
        kind = chance.choice(("SIGKILL", "SIGTERM"))
        order = f"{chance.randrange(2)}:{chance.randint(1, 8)}:{kind}"
        killed = _train(name, tmp_path / "killed", *length, OWN_SIGNAL=order)
        assert (killed.returncode == StoppedError.exit_code) == (kind == "SIGTERM"), killed.stderr
        assert killed.returncode, "too few epochs"
    _finish(name, tmp_path / "killed", *length)
    assert _results(tmp_path / "killed") == _results(tmp_path / "undisturbed")


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", FROM_THE_PAGE)
def test_kills_anywhere_in_migrated_scripts_change_no_bit(name: str, tmp_path: Path) -> None:
    chance, length = random.Random(name), ("--epochs", "48")
    _finish(name, tmp_path / "undisturbed", *length)
    for _ in range(20):
        line, kind = chance.randint(1, 2 * LINES_PER_EPOCH[name]), chance.choice(("SIGKILL", "SIGTERM"))
        killed = _train(name, tmp_path / "killed", *length, OWN_LINE=f"{chance.randrange(2)}:{line}:{kind}")
        assert killed.returncode, "too few epochs"
    _finish(name, tmp_path / "killed", *length)
    assert _results(tmp_path / "killed") == _results(tmp_path / "undisturbed")


@pytest.mark.long
@pytest.mark.parametrize("name", FROM_THE_PAGE)
def test_migrated_scripts_do_not_depend_on_the_worker_count(name: str, tmp_path: Path) -> None:
    found = []
    for size in (1, 2, 3):
        _finish(name, tmp_path / str(size), *FROM_THE_PAGE[name], size=size)
        found.append([(step, lr, loss) for step, lr, loss, _ in _figures(tmp_path / str(size))])
    for figures in found[1:]:
        assert len(figures) == len(found[0])
        for own, expected in zip(figures, found[0], strict=True):
            assert own == pytest.approx(expected, rel=1e-9)


@pytest.mark.long
@pytest.mark.parametrize("sizes", [(2, 3), (3, 2)])
@pytest.mark.parametrize("name", OF_ANY_SIZE)
def test_another_number_of_workers_gives_the_same_losses(name: str, sizes: tuple[int, int], tmp_path: Path) -> None:
    arguments, samples = OF_ANY_SIZE[name], [tmp_path / "samples of two", tmp_path / "samples of both"]
    for folder in samples:
        folder.mkdir()
    _finish(name, tmp_path / "undisturbed", *arguments, OWN_SAMPLES=str(samples[0]))
    both = {"OWN_SAMPLES": str(samples[1])}
    stopped = _train(name, tmp_path / "both", *arguments, size=sizes[0], OWN_SIGNAL="0:3:SIGTERM", **both)
    assert stopped.returncode == StoppedError.exit_code, stopped.stderr
    _finish(name, tmp_path / "both", *arguments, size=sizes[1], **both)
    sequence, expected = _figures(tmp_path / "both"), _figures(tmp_path / "undisturbed")
    assert len(sequence) == len(expected)
    for (step, _, loss, metrics), (expected_step, _, expected_loss, expected_metrics) in zip(
        sequence, expected, strict=True
    ):
        assert step == expected_step
        assert loss == pytest.approx(expected_loss, rel=1e-9), step
        assert metrics == (expected_metrics and pytest.approx(expected_metrics, rel=1e-9)), step
    assert _samples_by_step(samples[1]) == _samples_by_step(samples[0])


def _samples_by_step(folder: Path) -> dict[int, list[int]]:
    found: dict[int, list[int]] = defaultdict(list)
    for path in folder.iterdir():
        for line in path.read_text().splitlines():
            step, *samples = map(int, line.split())
            found[step] += samples
    return {step: sorted(samples) for step, samples in found.items()}


FULL_DISK = """
import resource, signal
import torch
import lockstep

world = lockstep.connect("cpu")
run = world.run("runs/full", model=world.prepare(torch.nn.Linear(300, 300)))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, -1))
for epoch in run.epochs(1):
    run.step()
"""


def test_errors_end_a_script_with_their_exit_codes(tmp_path: Path) -> None:
    """Here a checkpoint that a full disk refuses, under plain Python."""
    (tmp_path / "full.py").write_text(FULL_DISK)
    done = run([sys.executable, "full.py"], tmp_path, own_environment())
    assert done.returncode == CheckpointError.exit_code, done.stderr
    assert "Traceback" in done.stderr
    assert "File too large" in done.stderr.splitlines()[-1]


NOT_FINITE = """
import lockstep, torch
model = lockstep.connect().prepare(torch.nn.Linear(1, 1))
run = lockstep.connect().run("runs/nan", model=model, log_every=1)
for epoch in run.epochs(1):
    run.step(loss=float("nan"))
"""


def test_permanent_error_of_a_script_is_not_restarted(tmp_path: Path) -> None:
    (tmp_path / "nan.py").write_text(NOT_FINITE)
    command = [*LOCKSTEP, "run", "-np", "2", "--max-restarts", "2", "--", sys.executable, "nan.py"]
    done = run(command, tmp_path, own_environment())
    assert done.returncode == NonFiniteLossError.exit_code, done.stderr
    assert "NonFiniteLossError: the mean loss is nan up to step 1" in done.stderr
    assert done.stderr.splitlines()[-1] == "lockstep: not restarting: the error is permanent"
