"""What the tutorial says of its scripts and its pages' outputs do not show: they are one training, in other words."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from commands import HOROVODRUN, TORCHRUN, own_environment, run

TUTORIAL = Path(__file__).parents[2] / "examples" / "tutorial"
ALONE = (sys.executable,)
BY_HOROVODRUN = (*HOROVODRUN, "-np", "2", sys.executable)
EPOCHS = 2

pytest.importorskip("horovod.torch", reason="lockstep-horovod (compat/horovod) is not installed")


# Runs a script; fails if a thread of Gloo outlives it, which would abort Python now and then by releasing a tensor.
WITHOUT_GLOO = """
import contextlib, runpy, sys, time
from pathlib import Path

def threads():
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended since
            yield (task / "comm").read_text()

sys.path.insert(0, str(Path(sys.argv[1]).parent))
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
while "gloo" in (names := "".join(threads())):
    time.sleep(0.05)  # one that has been joined may be listed for a moment
assert "python" in names
"""


def lines(launcher: tuple[str, ...], script: str, *words: str, folder: Path) -> list[str]:
    """What a script prints, without its launcher's prefix."""
    (folder / "without_gloo.py").write_text(WITHOUT_GLOO)
    outside = [folder / "without_gloo.py"] if launcher == TORCHRUN else []
    done = run([*launcher, *outside, TUTORIAL / script, *words], folder, own_environment(OMP_NUM_THREADS="1"))
    assert done.returncode == 0, done.stderr
    return [re.sub(r"^\[\d+\]<stdout>:", "", line) for line in done.stdout.splitlines() if line]


def loss(line: str) -> float:
    return float(re.findall(r"loss ([\d.]+)", line)[0])


SCRIPTS = {"01_one_process.py": ALONE, "03_ddp.py": TORCHRUN, "04_horovod.py": BY_HOROVODRUN}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, list[str]]]:
    """Each script's folder after two epochs, and its lines of these."""
    found = {}
    for script, launcher in SCRIPTS.items():
        folder = tmp_path_factory.mktemp(script[:2])
        found[script] = (folder, lines(launcher, script, "--epochs", str(EPOCHS), folder=folder)[-EPOCHS:])
    return found


@pytest.fixture(scope="module")
def next_loss(trained: dict[str, tuple[Path, list[str]]], tmp_path_factory: pytest.TempPathFactory) -> float:
    """The loss of the epoch after these, by the script for one process."""
    return loss(go_on("01_one_process.py", "01_one_process.py", trained, tmp_path_factory.mktemp("next")))


def go_on(by: str, writer: str, trained: dict[str, tuple[Path, list[str]]], folder: Path) -> str:
    """The line of one more epoch, by a script from the checkpoint that `writer` has written."""
    words = ("--epochs", str(EPOCHS + 1), "--resume", str(trained[writer][0] / "checkpoint.pt"))
    (line,) = lines(SCRIPTS[by], by, *words, folder=folder)
    return line


@pytest.mark.parametrize("script", ["03_ddp.py", "04_horovod.py"])
def test_all_ways_take_the_same_steps(script: str, trained: dict[str, tuple[Path, list[str]]]) -> None:
    expected, found = (trained[name] for name in ("01_one_process.py", script))
    assert [loss(line) for line in found[1]] == pytest.approx([loss(line) for line in expected[1]], rel=0.01)
    weights, others = (
        torch.load(folder / "checkpoint.pt", weights_only=True)["model"] for folder, _ in (found, expected)
    )
    assert weights.keys() == others.keys()
    assert all(torch.allclose(weights[name], others[name], atol=1e-3) for name in weights)


@pytest.mark.long
@pytest.mark.parametrize(("by", "writer"), [("04_horovod.py", "01_one_process.py"), ("03_ddp.py", "04_horovod.py")])
def test_each_goes_on_from_anothers_checkpoint(
    by: str, writer: str, trained: dict[str, tuple[Path, list[str]]], next_loss: float, tmp_path: Path
) -> None:
    line = go_on(by, writer, trained, tmp_path)
    assert line.startswith(f"epoch {EPOCHS + 1}: ")
    assert loss(line) == pytest.approx(next_loss, rel=0.01)


def test_the_eight_steps_are_there_in_their_order() -> None:
    text = (TUTORIAL / "04_horovod.py").read_text()
    steps = re.findall(r"^ +# (\d)\. (\w+)", text, flags=re.MULTILINE)
    words = ["Initialize", "Pin", "Scale", "Wrap", "Broadcast", "Partition", "Checkpoint", "Average"]
    assert steps == [(str(number), word) for number, word in enumerate(words, start=1)]


def test_one_worker_writes_curves_of_all(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    printed = lines(TORCHRUN, "06_tensorboard.py", "--epochs", "2", folder=tmp_path)
    assert len(list((tmp_path / "curves").iterdir())) == 1
    curves = EventAccumulator(str(tmp_path / "curves"))
    curves.Reload()
    written = [(event.step, event.value) for event in curves.Scalars("Loss/train")]
    assert [step for step, _ in written] == [1, 2]
    assert [value for _, value in written] == pytest.approx([loss(line) for line in printed], abs=1e-4)
    assert curves.Scalars("Top1/val")[-1].value == pytest.approx(int(printed[-1].split()[4]) / 360)


@pytest.mark.long
def test_accumulated_passes_are_one_large_batch(tmp_path: Path) -> None:
    words = ("--epochs", "5", "--scale-rate")
    one = lines(TORCHRUN, "08_large_batch.py", *words, "--batch-size", "128", folder=tmp_path)
    four = lines(TORCHRUN, "08_large_batch.py", *words, "--batch-size", "32", "--accumulate", "4", folder=tmp_path)
    assert one[0] == four[0] == "global batch 256, 5 steps an epoch, rate 0.08"
    assert loss(four[1]) == pytest.approx(loss(one[1]), rel=0.02)


@pytest.mark.long
@pytest.mark.parametrize(
    "words",
    [("05_mixed_precision.py", "--epochs", "1"), ("09_throughput.py", "--steps", "1")],
    ids=lambda words: words[0],
)
def test_gloos_threads_have_ended_before_python_does(words: tuple[str, ...], tmp_path: Path) -> None:
    lines(TORCHRUN, *words, folder=tmp_path)


@pytest.mark.parametrize(
    "script", sorted(path.name for path in TUTORIAL.glob("*.py") if "DistributedDataParallel(" in path.read_text())
)
def test_group_starts_after_the_optimizer_and_is_destroyed(script: str) -> None:
    """In this order, destroy_process_group() ends Gloo's threads."""
    text = (TUTORIAL / script).read_text()
    calls = ("torch.optim.SGD(", " dist.init_process_group(", " dist.destroy_process_group()")
    positions = [text.index(call) for call in calls]
    assert positions == sorted(positions)
