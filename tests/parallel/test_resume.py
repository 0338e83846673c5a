"""Runs of several workers resume exactly, also from files of older scripts, and do not depend on the launcher."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from attack import Attack
from commands import HOROVODRUN, LOCKSTEP, TORCHRUN, Command, Done, of_one_thread, run
from resumable import USERS, End, KilledError, results, session
from runs import final_weights, losses, small_digits, train_digits, weights_of
from safetensors.torch import load_file
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import TensorDataset
from worker_group import run_in_workers

from lockstep.cli import main
from lockstep.files.jsonl import read_records
from lockstep.models import registry
from lockstep.run import stopping
from lockstep.run.checkpoints.checkpoint_folder import newest
from lockstep.run.connect import TrainingWorld
from lockstep.train.fit import configure
from lockstep.train.run import run_with
from lockstep.world.world import World

SETTINGS = {"epochs": 2, "global_batch_size": 60, "log_every": 1, "shift": 1, "lr": 0.05}
SAMPLES, STEPS = 260, 10  # epochs of 60, 60, 60, 60 and 20 samples


def _train(size: int, path: Path, **settings: object) -> None:
    run_in_workers(size, train_digits, "lively", SAMPLES, 50, {**SETTINGS, "run_dir": path, **settings})


@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize(
    ("size", "end", "options", "stopped_after"),
    [
        (3, End(8, KilledError), {"checkpoint_epochs": 0, "checkpoint_steps": 7}, None),
        # The agreement of this step had begun before the signal came; the next comes with the next step.
        (2, End(5, rank=1), {"log_every": 4}, 6),
        pytest.param(2, End(3, KilledError), {"checkpoint_steps": 2}, None, marks=pytest.mark.long),
        pytest.param(2, End(2), {}, 3, marks=pytest.mark.long),
        pytest.param(3, End(7, rank=2), {}, 8, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_interrupted_workers_end_as_undisturbed_ones(
    user: str,
    size: int,
    end: End,
    options: dict[str, Any],
    stopped_after: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stopping, "APART_SECONDS", 0.0)  # so that they agree in every step
    options, parts = {"keep": 1, "log_every": 1, **options}, tmp_path / "parts"
    run_in_workers(size, _session, user, tmp_path / "whole", None, options)
    (message,) = set(run_in_workers(size, _session, user, parts, end, options))
    if stopped_after:
        assert message.startswith(f"stopped by SIGTERM after step {stopped_after}"), message
        assert f"{parts / 'checkpoints'}/step-{stopped_after:08d}; to resume" in message
    run_in_workers(size, _session, user, parts, None, options)
    assert results(parts) == results(tmp_path / "whole")


def _session(world: World, user: str, folder: Path, end: End | None, options: dict[str, Any]) -> str:
    return session(world, user, folder, end, **options)


def _train_tables(world: World, path: Path, settings: dict[str, Any]) -> None:
    torch.manual_seed(world.rank)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    model.register_buffer("rows", torch.rand(1, 3).expand(4, 3))
    model.register_buffer("counts", torch.arange(3).expand(2, 3))
    model.register_buffer("codes", torch.full((3,), world.rank + 1).to(torch.uint16))
    model.register_buffer("table", torch.rand(3).to(torch.float8_e4m3fn))
    common = {"epochs": 1, "batch_size": 8, "track": (), "run_dir": path, "ema_decay": 0.9}
    run_with(configure(**common, **settings), world, small_digits(48, 16), model)


@pytest.mark.parametrize(("strategy", "precision"), [("ddp", "O2"), ("horovod", "fp32")])
def test_unusual_buffers_are_trained_with_and_resumed(strategy: str, precision: str, tmp_path: Path) -> None:
    for more in ({"max_steps": 2}, {"resume": "auto"}):
        run_in_workers(2, _train_tables, tmp_path, {"strategy": strategy, "precision": precision, **more})
    weights = weights_of(tmp_path)
    assert weights["codes"].tolist() == [1] * 3
    torch.manual_seed(0)
    nn.Linear(64, 10)
    expected = torch.rand(1, 3).expand(4, 3)
    torch.testing.assert_close(weights["rows"], expected, rtol=2e-3 if precision == "O2" else 0, atol=0)


def _train_average(world: World, path: Path, epochs: int) -> tuple[int, list[str], list[Any]]:
    own = TrainingWorld(world.rank_info, world.device)
    torch.manual_seed(world.rank)
    model = own.prepare(nn.Linear(2, 1))
    average, optimizer = AveragedModel(model), torch.optim.SGD(model.parameters(), lr=0.1)
    loader = own.loader(TensorDataset(torch.ones(6, 2)), global_batch=6)
    run = own.run(path, loader=loader, model=model, average=average, optimizer=optimizer)
    before = int(average.n_averaged)
    for _ in run.epochs(epochs):
        for (inputs,) in loader:
            optimizer.zero_grad()
            run.backward(model(inputs).square().mean())
            optimizer.step()
            average.update_parameters(model)
            run.step()
    run.close()
    return before, [*load_file(newest(path / "checkpoints") / "model.safetensors")], average.module(inputs).tolist()


@pytest.mark.parametrize("sizes", [(2, 1), (1, 3)])
def test_average_of_prepared_model_resumes_on_other_workers(sizes: tuple[int, int], tmp_path: Path) -> None:
    (_, names, _), *_ = run_in_workers(sizes[0], _train_average, tmp_path, 2)
    assert {"model.weight", "average.module.weight", "average.n_averaged"} < {*names}
    for before, again, _ in run_in_workers(sizes[1], _train_average, tmp_path, 3):
        assert (before, again) == (2, names)


def _train_sharded(world: World, path: Path, epochs: int) -> list[float]:
    own = TrainingWorld(world.rank_info, world.device)
    torch.manual_seed(0)
    model = own.prepare(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)
    loader = own.loader(TensorDataset(torch.arange(12.0).reshape(6, 2)), global_batch=6)
    run = own.run(path, loader=loader, model=model, optimizer=optimizer)
    for _ in run.epochs(epochs):
        for (inputs,) in loader:
            optimizer.zero_grad()
            run.backward(model(inputs).square().mean())
            optimizer.step()
            run.step()
    run.close()
    return [each for parameter in model.parameters() for each in parameter.flatten().tolist()]


def test_sharded_optimizer_of_an_own_loop_is_gathered(tmp_path: Path) -> None:
    whole = run_in_workers(2, _train_sharded, tmp_path / "whole", 3)
    run_in_workers(2, _train_sharded, tmp_path / "stopped", 2)
    assert run_in_workers(2, _train_sharded, tmp_path / "stopped", 3) == whole


@pytest.mark.parametrize(
    "extra",
    [
        {"ema_decay": 0.9, "optimizer": "adamw", "lr": 1e-3},
        {"accumulate": 2, "clip_norm": 0.1, "precision": "bf16"},
        {"schedule": "onecycle", "momentum": 0.0, "decay_all": False, "channels_last": True},
    ],
)
def test_every_kind_of_state_is_resumed(tmp_path: Path, extra: dict[str, object]) -> None:
    _train(2, tmp_path / "whole", **extra)
    _train(2, tmp_path / "stopped", max_steps=7, **extra)
    _train(2, tmp_path / "stopped", resume="auto", **extra)
    assert final_weights(tmp_path / "stopped") == final_weights(tmp_path / "whole")
    states = [
        max((tmp_path / run / "checkpoints").glob("step-*")) / "states.safetensors" for run in ("whole", "stopped")
    ]
    assert ("average.n_averaged" in load_file(states[0])) == ("ema_decay" in extra)
    assert states[0].read_bytes() == states[1].read_bytes()


def test_momentum_of_channels_last_weights_keeps_its_layout(tmp_path: Path) -> None:
    settings = {**SETTINGS, "channels_last": True}
    for path, extra in (("whole", {}), ("stopped", {"max_steps": 7}), ("stopped", {"resume": "auto"})):
        run_in_workers(2, train_digits, "deep", SAMPLES, 50, {**settings, **extra, "run_dir": tmp_path / path})
    assert final_weights(tmp_path / "stopped") == final_weights(tmp_path / "whole")


def test_another_number_of_workers_goes_on_with_the_same_samples(tmp_path: Path) -> None:
    _train(1, tmp_path / "whole", precision="fp64")
    settings = {"net": "plain"}
    for path, sizes in ((tmp_path / "alone", (1, 1)), (tmp_path / "grown", (2, 3))):
        for size, extra in zip(sizes, ({"max_steps": 4}, {"resume": "auto"}), strict=True):
            job = {**SETTINGS, "run_dir": path, "precision": "fp64", **extra}
            run_in_workers(size, train_digits, settings["net"], SAMPLES, 50, job)
    assert losses(tmp_path / "grown") == pytest.approx(losses(tmp_path / "alone"), abs=1e-9, rel=0)
    assert len(losses(tmp_path / "grown")) == STEPS


TRAIN = ["-m", "lockstep", "train", "digits", "--epochs", "1", "--device", "cpu", "--run-dir"]
LAUNCHERS = {
    "lockstep run": (*LOCKSTEP, "run", "-np", "2", "--", sys.executable),
    "horovodrun": (*HOROVODRUN, "-np", "2", sys.executable),
    "torchrun": TORCHRUN,
}


def _trained_weights(words: Command, folder: Path) -> bytes:
    done = run(words, folder, of_one_thread())
    assert done.returncode == 0, done.stderr
    assert "over 2 workers" in done.stdout
    return final_weights(folder / "run")


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return _trained_weights([sys.executable, *TRAIN, "run", "-np", "2"], tmp_path_factory.mktemp("local"))


@pytest.mark.parametrize("launcher", LAUNCHERS)  # of MPI: test_mpi
def test_the_weights_are_the_same_to_the_bit(launcher: str, expected: bytes, tmp_path: Path) -> None:
    assert _trained_weights([*LAUNCHERS[launcher], *TRAIN, "run"], tmp_path) == expected


OLD_WORDS = ["digits", "-a", "digits-net", "--b", "32", "-p", "10", "--epochs", "3", "--no-cuda", "--resume"]


def _old_file(path: Path, **extra: object) -> Path:
    """What the ImageNet examples write, of the network for the digits after two epochs."""
    torch.manual_seed(0)
    net = registry.build("digits-net", 10, 1, 8)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    net(torch.randn(4, 1, 8, 8)).sum().backward()
    optimizer.step()
    state = {f"module.{name}": tensor for name, tensor in net.state_dict().items()}
    content = {"epoch": 2, "arch": "digits-net", "state_dict": state, "best_prec1": 51.0}
    torch.save({**content, "optimizer": optimizer.state_dict(), **extra}, path)
    return path


def _train_by_command(*words: str, cwd: Path) -> Done:
    return run([*LOCKSTEP, "train", "-np", "2", *words], cwd)


def test_two_workers_go_on_from_an_old_file(tmp_path: Path) -> None:
    _old_file(tmp_path / "checkpoint.pth.tar")
    done = _train_by_command(*OLD_WORDS, "checkpoint.pth.tar", "--run-dir", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "weights from checkpoint.pth.tar: 2 epochs finished, best top-1 51.00 %" in done.stdout
    assert "the optimizer starts without the file's state" in done.stdout
    records = list(read_records(tmp_path / "run" / "metrics.jsonl"))
    assert [r["epoch"] for r in records if r["kind"] == "epoch"] == [3, 3]
    assert records[0]["step"] == 2 * -(-1437 // 64)
    assert "--run-dir" in _train_by_command(*OLD_WORDS, "checkpoint.pth.tar", "--run-dir", "run", cwd=tmp_path).stderr


def test_a_hostile_file_stops_both_workers_and_runs_nothing(tmp_path: Path) -> None:
    marker = tmp_path / "owned"
    _old_file(tmp_path / "bad.pth", best_prec1=Attack(os.system, f"touch {marker}"))
    done = _train_by_command(*OLD_WORDS, "bad.pth", "--run-dir", "run", cwd=tmp_path)
    assert done.returncode == 5
    assert "bad.pth: not loaded, and no code in it was run: it references posix.system" in done.stderr
    assert not marker.exists()
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_old_files_are_evaluated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    _old_file(Path("old.pth"))
    assert main(["train", "digits", "-e", "--resume", "old.pth"]) == 0
    line = capsys.readouterr().out
    assert "of 360 images right" in line
    assert main(["eval", "old.pth", "digits"]) == 0
    assert capsys.readouterr().out == line
    _old_file(Path("nameless.pth"), arch=None)
    assert main(["eval", "nameless.pth", "digits", "-a", "digits-net"]) == 0
    assert capsys.readouterr().out == line
    assert main(["eval", "nameless.pth", "digits"]) == 5
    assert "add -a NAME" in capsys.readouterr().err
    assert main(["eval", "old.pth"]) == 2
    assert "name the data set or folder" in capsys.readouterr().err
    assert main(["train", "digits", "-a", "mnist-net", "-e", "--resume", "old.pth"]) == 5
    assert "does not fit --arch mnist-net" in capsys.readouterr().err
    assert main(["train", "digits", "-e", "-r"]) == 2
    assert "no run of this data set and model in runs/" in capsys.readouterr().err
