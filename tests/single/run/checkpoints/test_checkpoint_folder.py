"""Checkpoints: snapshots, whole folders, and those to keep."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import shutil
import signal
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import simgpu
import torch
from attack import Attack
from disks import largest_file
from simulated_gpu import run_on_gpu
from torch import nn

from lockstep.config.mapping import to_mapping
from lockstep.data.sources import digits
from lockstep.errors import CheckpointError
from lockstep.run.checkpoints import checkpoint_folder, checkpoint_format, legacy_format
from lockstep.run.checkpoints.checkpoint_folder import CheckpointFolder
from lockstep.run.checkpoints.snapshot import HostCopies, Snapshot
from lockstep.train.inference import load_network, load_old_network
from lockstep.train.progress import Progress

ABOUT = {"arch": "digits-net", "classes": ["a", "b"]}


def _snapshot(step: int, kind: type = torch.optim.AdamW) -> Snapshot:
    torch.manual_seed(step)
    net = nn.Linear(3, 2)
    optimizer = kind(net.parameters(), lr=0.1)
    net(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    return Snapshot(step, dict(net.state_dict()), optimizer.state_dict(), {"step": step}, ABOUT, {"--seed": 0})


def _save(folder: Path, snapshot: Snapshot, keep: int = 3, is_best: bool = False) -> Path:
    checkpoints = CheckpointFolder(folder, keep)
    checkpoints.save(lambda: snapshot, is_best)
    checkpoints.wait()
    return folder / f"step-{snapshot.step:08d}"


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop])
def test_what_is_saved_is_read_back_to_the_bit(tmp_path: Path, kind: type) -> None:
    snapshot = _snapshot(7, kind)
    loaded = checkpoint_format.load(_save(tmp_path, snapshot))
    assert loaded.step == 7
    assert (loaded.progress, loaded.job, loaded.about) == ({"step": 7}, {"--seed": 0}, ABOUT)
    assert all(torch.equal(loaded.model[name], tensor) for name, tensor in snapshot.model.items())
    fresh = kind(nn.Linear(3, 2).parameters(), lr=0.5)
    fresh.load_state_dict(dict(loaded.states))
    for number, entries in snapshot.states["state"].items():
        for name, value in entries.items():
            assert torch.equal(torch.as_tensor(fresh.state_dict()["state"][number][name]), torch.as_tensor(value))
    assert fresh.param_groups[0]["lr"] == 0.1


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    for step in range(1, 7):
        _save(tmp_path, _snapshot(step), keep=2, is_best=step == 2)
    assert [path.name for path in checkpoint_folder.complete(tmp_path)] == [
        "step-00000002",
        "step-00000005",
        "step-00000006",
    ]
    assert checkpoint_format.load(checkpoint_folder.best_or_newest(tmp_path)).step == 2
    assert not list(tmp_path.glob(".partial*"))


@pytest.mark.parametrize("name", ["model.safetensors", "states.safetensors", "state.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_damage_is_found_and_named(tmp_path: Path, name: str, damage: str) -> None:
    path = _save(tmp_path, _snapshot(1)) / name
    content = bytearray(path.read_bytes())
    if damage == "remove":
        path.unlink()
    else:
        content[len(content) // 2] ^= 1
        path.write_bytes(content[:-3] if damage == "cut" else content)
    with pytest.raises(CheckpointError, match=name):
        checkpoint_format.load(path.parent)


def test_unfinished_folder_is_not_a_checkpoint(tmp_path: Path) -> None:
    done = _save(tmp_path, _snapshot(1))
    unfinished = tmp_path / ".partial-step-00000002"
    unfinished.mkdir()
    (unfinished / "model.safetensors").write_bytes(b"")
    assert checkpoint_folder.newest(tmp_path) == done
    _save(tmp_path, _snapshot(2))
    assert not unfinished.exists()


def test_a_step_that_is_saved_again_replaces_the_old_one(tmp_path: Path) -> None:
    for about in ({"arch": "old"}, {"arch": "new"}):
        _save(tmp_path, dataclasses.replace(_snapshot(1), about=about))
    assert checkpoint_format.load(tmp_path / "step-00000001").about == {"arch": "new"}
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_failed_write_is_reported_and_the_last_checkpoint_stays(tmp_path: Path) -> None:
    good, told = _save(tmp_path, _snapshot(1)), []
    checkpoints = CheckpointFolder(tmp_path, 3)
    checkpoints.report_to(told.append, nullcontext)
    with largest_file(100):
        checkpoints.save(lambda: _snapshot(2), is_best=True)
        with pytest.raises(CheckpointError, match=r"step 2 was not written: File too large .* the newest is step 1$"):
            checkpoints.wait()
    assert [line.endswith("the newest is step 1; training continues") for line in told] == [True]
    assert [path.name for path in tmp_path.iterdir()] == [good.name]
    checkpoints.save(lambda: _snapshot(3))
    checkpoints.wait()
    assert checkpoint_format.load(good).step == 1
    assert checkpoint_format.load(checkpoint_folder.best_or_newest(tmp_path)).step == 2  # kept until there was room


def test_too_little_room_is_foreseen(tmp_path: Path, room: Callable[[int], None]) -> None:
    room(3_000_000)
    checkpoints = CheckpointFolder(tmp_path / "run" / "checkpoints", 3)
    checkpoints.save(lambda: _snapshot(1))
    with pytest.raises(CheckpointError, match=f"needs 4.2 MB, but {tmp_path} has 3.0 MB free; .* has none yet"):
        checkpoints.wait()
    assert not list(tmp_path.iterdir())


def test_a_folder_removed_during_a_write_is_made_again(tmp_path: Path) -> None:
    folder, confirmations = tmp_path / "run" / "checkpoints", list[bool]()

    def confirm() -> None:  # before and after a write
        confirmations.append(folder.exists())
        if len(confirmations) == 2:
            shutil.rmtree(tmp_path / "run")

    checkpoints = CheckpointFolder(folder, 3, confirm=confirm)
    checkpoints.save(lambda: _snapshot(1))
    checkpoints.wait()
    assert checkpoint_format.load(folder / "step-00000001").step == 1
    assert confirmations[:3] == [False, True, False]


def test_an_interrupted_wait_for_a_write_is_repeated(tmp_path: Path) -> None:
    interrupted = threading.Event()

    def wait() -> None:
        assert interrupted.wait(60)

    checkpoints = CheckpointFolder(tmp_path, 3)
    checkpoints.save(lambda: dataclasses.replace(_snapshot(1), wait=wait))
    main = threading.get_ident()

    def wait_until_interrupted() -> None:
        threading.Timer(0.2, lambda: signal.pthread_kill(main, signal.SIGINT)).start()
        checkpoints.wait()

    with pytest.raises(KeyboardInterrupt):
        wait_until_interrupted()
    threading.Timer(0.2, interrupted.set).start()
    checkpoints.close()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_what_goes_wrong_in_the_background_is_raised(tmp_path: Path) -> None:
    checkpoints = CheckpointFolder(tmp_path, 3)
    checkpoints.save(lambda: dataclasses.replace(_snapshot(1), about={"arch": object()}))
    with pytest.raises(TypeError, match="not JSON serializable"):
        checkpoints.wait()


def test_the_newest_sound_one_is_found(tmp_path: Path) -> None:
    paths = [_save(tmp_path, _snapshot(step)) for step in (1, 2, 3)]
    (paths[2] / "manifest.json").unlink()
    damaged = paths[1] / "states.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    found, problems = checkpoint_folder.newest_sound(tmp_path)
    assert found == paths[0]
    assert [str(paths[2] / "manifest.json") in problems[0], str(damaged) in problems[1]] == [True, True]
    (paths[0] / "state.json").unlink()
    with pytest.raises(CheckpointError, match=r"(?s)all checkpoints in .* are damaged: .*manifest.*states.*state.json"):
        checkpoint_folder.newest_sound(tmp_path)


def test_a_hostile_file_is_refused_without_running_it(tmp_path: Path) -> None:
    attack = Attack(os.system, f"touch {tmp_path / 'owned'}")
    path = tmp_path / "model.safetensors"
    path.write_bytes(pickle.dumps(attack))
    with pytest.raises(CheckpointError, match="safetensors"):
        checkpoint_folder.load_model(path)
    torch.save({"net": attack}, path)
    with pytest.raises(CheckpointError, match="safetensors"):
        checkpoint_folder.load_model(path)
    assert not (tmp_path / "owned").exists()


def test_files_of_another_size_are_not_read(tmp_path: Path) -> None:
    """Not even those before them in the list: a sparse file of a terabyte takes no room on a disk, and an hour."""
    path = _save(tmp_path, _snapshot(1))
    os.truncate(path / "state.json", 1 << 40)
    content = bytearray((path / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (path / "model.safetensors").write_bytes(content)  # which is found only if it is read
    with pytest.raises(CheckpointError, match=r"state\.json is damaged: it does not match manifest\.json"):
        checkpoint_format.verify(path)


@pytest.mark.parametrize(
    "damage",
    [
        lambda files: files.pop("states.safetensors"),
        lambda files: files.update({"states.safetensors": 3}),
        lambda files: files["states.safetensors"].pop("bytes"),
        lambda files: files["states.safetensors"].update(bytes="9"),
        lambda files: files["states.safetensors"].update(sha256="a" * 63 + "x"),
    ],
)
def test_a_damaged_manifest_is_not_blamed_on_a_file(tmp_path: Path, damage: Callable[[dict[str, Any]], object]) -> None:
    path = _save(tmp_path, _snapshot(1))
    manifest = json.loads((path / "manifest.json").read_text())
    damage(manifest["files"])
    (path / "manifest.json").write_text(json.dumps(manifest))
    for read in (checkpoint_format.verify, checkpoint_format.load):
        with pytest.raises(CheckpointError) as caught:
            read(path)
        assert str(caught.value).startswith(
            f"{path / 'manifest.json'} is damaged: it lacks the size or SHA-256 of states"
        )


@pytest.mark.parametrize("umask", [0o022, 0o002, 0o077])
def test_all_files_follow_the_umask(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        path = _save(tmp_path, _snapshot(1))
        checkpoint_format.export(tmp_path / "model.safetensors", {"w": torch.zeros(1)}, ABOUT)
    finally:
        os.umask(before)
    files = [tmp_path / "model.safetensors", *path.iterdir()]
    assert {oct(file.stat().st_mode & 0o777) for file in files} == {oct(0o666 & ~umask)}


def test_a_header_that_would_take_minutes_is_refused(tmp_path: Path) -> None:
    entry = '"%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    header = ("{" + ",".join(entry % number for number in range(140_000)) + "}").encode()
    path = tmp_path / "m.safetensors"
    for content in (header, b" " * ((64 << 20) + 1)):
        path.write_bytes(len(content).to_bytes(8, "little") + content)
        with pytest.raises(CheckpointError, match=r"its header has more than 67,108,864 bytes or 131,072 tensors"):
            checkpoint_folder.load_model(path)


def test_state_of_another_form_is_refused(tmp_path: Path) -> None:
    path = _save(tmp_path, _snapshot(1))
    whole = json.loads((path / "state.json").read_text())
    wrong = [
        *([], {"step": "x"}, {"step": 1, "states": 3}),
        *({**whole, "step": step} for step in (1e308, True, -1, 1 << 80)),
        *({**whole, name: 3} for name in ("progress", "job", "about", "states")),
        *({**whole, "states": tree} for tree in ([], {"pairs": 3}, {"tensor of this name": "x"}, {"tuple": 3})),
    ]
    for text in [*map(json.dumps, wrong), "[" * 100_000]:
        (path / "state.json").write_text(text)
        manifest = json.loads((path / "manifest.json").read_text())
        manifest["files"]["state.json"] = checkpoint_format.describe_file(path / "state.json")
        (path / "manifest.json").write_text(json.dumps(manifest))
        with pytest.raises(CheckpointError, match=str(path)):
            checkpoint_format.load(path)


@pytest.mark.parametrize(
    "change",
    [
        *({"step": value} for value in (1e308, True, "1", -1, 1 << 80)),
        *(
            {"overflowed": 3},
            {"overflowed": [-1]},
            {"open_times": [-1.0, 0.0]},
            {"seconds": "long"},
            {"seconds": float("nan")},
            {"skipped_steps": 9},
        ),
        *({"epoch_totals": {"loss": []}}, {"epoch_totals": 3}, {"unheard_of": 1}, {"best_loss": []}),
    ],
)
def test_progress_that_no_run_can_have_is_refused(change: dict[str, object]) -> None:
    with pytest.raises((TypeError, ValueError)):
        Progress.from_mapping({**to_mapping(Progress(step=7)), **change})


INPUT = {"channels": 1, "height": 8, "width": 8, "mean": [0.5], "std": [0.5]}


@pytest.mark.parametrize(
    "change",
    [
        *({"arch": 3}, {"classes": "abc"}, {"classes": [1]}, {"data": ["digits"]}, {"input": []}),
        *({"input": {**INPUT, name: 1 << 40}} for name in ("channels", "height", "width")),
        *({"input": {**INPUT, "std": std}} for std in ([0.0], ["x"], [0.5, 0.5], 0.5)),
        {"input": {**INPUT, "crop_ratio": float("nan")}},
        {"input": {**INPUT, "bits": 0}},
        *({"input": {**INPUT, name: [10**400]}} for name in ("mean", "std")),
    ],
)
def test_model_with_a_nonsense_description_is_refused(tmp_path: Path, change: dict[str, object]) -> None:
    about = {"arch": "digits-net", "classes": ["a"], "input": INPUT, **change}
    checkpoint_format.export(tmp_path / "m.safetensors", {"w": torch.zeros(1)}, about)
    with pytest.raises(CheckpointError, match="invalid model metadata"):
        load_network(tmp_path / "m.safetensors")


def test_code_that_a_file_names_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "attack.py").write_text("open('owned', 'w').close()\ndef build(num_classes): pass\n")
    monkeypatch.chdir(tmp_path)
    about = {"arch": "attack:build", "classes": ["a"], "input": INPUT}
    checkpoint_format.export(tmp_path / "m.safetensors", {"w": torch.zeros(1)}, about)
    torch.save({"state_dict": {"w": torch.zeros(1)}, "arch": "attack:build", "epoch": 1}, "m.pth")
    with pytest.raises(CheckpointError, match="if you trust it"):
        load_network(tmp_path / "m.safetensors")
    with pytest.raises(CheckpointError, match="if you trust it"):
        load_old_network(legacy_format.read(tmp_path / "m.pth"), None, digits.load())
    assert not (tmp_path / "owned").exists()


def test_exported_model_describes_itself(tmp_path: Path) -> None:
    weights = {"w": torch.arange(3.0)}
    checkpoint_format.export(tmp_path / "model.safetensors", weights, ABOUT)
    loaded, about = checkpoint_folder.load_model(tmp_path / "model.safetensors")
    assert about == ABOUT
    assert torch.equal(loaded["w"], weights["w"])
    assert checkpoint_folder.load_model(tmp_path)[1] == ABOUT  # the run folder means its exported model


def test_the_moving_average_is_what_is_used(tmp_path: Path) -> None:
    average = {"module.w": torch.ones(2), "n_averaged": torch.tensor(5)}
    snapshot = Snapshot(1, {"w": torch.zeros(2)}, {"average": average}, {}, ABOUT)
    weights, _ = checkpoint_folder.load_model(_save(tmp_path, snapshot))
    assert torch.equal(weights["w"], torch.ones(2))


def test_a_run_copied_with_its_links_followed_goes_on(tmp_path: Path) -> None:
    """Its `best` is a folder then."""
    _save(tmp_path / "first", _snapshot(1), is_best=True)
    shutil.copytree(tmp_path / "first", tmp_path / "copy")
    checkpoints = CheckpointFolder(tmp_path / "copy", keep=2)
    assert not (tmp_path / "copy" / "best").is_symlink()
    checkpoints.forget_after(1, best_step=1)
    assert (tmp_path / "copy" / "best").readlink() == Path("step-00000001")
    assert sorted(path.name for path in (tmp_path / "copy").iterdir()) == ["best", "step-00000001"]


def test_the_only_copy_of_the_best_is_kept(tmp_path: Path) -> None:
    _save(tmp_path / "best", _snapshot(1)).rename(tmp_path / "moved")
    (tmp_path / "best").rmdir()
    (tmp_path / "moved").rename(tmp_path / "best")
    checkpoints = CheckpointFolder(tmp_path, keep=2)
    checkpoints.forget_after(2, best_step=1)
    assert checkpoints.best_progress() == _snapshot(1).progress


def test_an_earlier_best_stays_if_the_best_was_not_written(tmp_path: Path) -> None:
    _save(tmp_path, _snapshot(1), is_best=True)
    _save(tmp_path, _snapshot(3))
    CheckpointFolder(tmp_path, keep=2).forget_after(3, best_step=2)
    assert (tmp_path / "best").readlink() == Path("step-00000001")


def test_a_file_in_place_of_the_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(CheckpointError, match=r"checkpoints cannot be written: Not a directory; .*--run-dir"):
        CheckpointFolder(tmp_path / "checkpoints", keep=2).forget_after(0, best_step=0)


def test_the_size_of_a_snapshot_has_tensors_in_lists_too(tmp_path: Path) -> None:
    """As L-BFGS keeps them."""
    state = {"state": {0: {"moments": [torch.zeros(100), (torch.zeros(50),)], "step": 3}}, "param_groups": []}
    snapshot = Snapshot(1, {"weight": torch.zeros(10)}, state, {}, ABOUT)
    assert snapshot.size_bytes == 4 * 160


GPU = torch.device("privateuseone", 0)  # simgpu:0 in its processes


def test_without_streams_a_state_is_copied_at_once() -> None:
    copies = HostCopies(torch.device("cpu"))
    weight = torch.arange(6.0).view(2, 3).t()
    buffers = copies.steady({"count": weight})
    assert buffers["count"] is weight
    with copies.making() as wait:
        state = copies.copy((weight,))
    weight.zero_()
    wait()
    assert state[0].is_contiguous()
    assert state[0].tolist() == [[0, 3], [1, 4], [2, 5]]


def _copy_with_little_memory() -> tuple[dict[str, int], list[float]]:
    psutil.virtual_memory = lambda: SimpleNamespace(available=4 * 2 * 1024)
    copies = HostCopies(GPU, workers=2)  # 1 KiB for each
    state = [torch.full((100,), float(number), device=GPU) for number in range(4)]  # 400 bytes: torch pins 512
    simgpu.reset_counts()
    with copies.making() as wait:
        made = copies.copy({"weights": state, "step": 3})
    counts = {name: count for name, count in simgpu.counts().items() if "cop" in name}
    wait()
    return counts, [tensor[0].item() for tensor in made["weights"]] + [made["step"]]


@pytest.mark.usefixtures("simulated_gpu")
def test_state_is_pinned_up_to_a_share_of_free_memory() -> None:
    assert run_on_gpu(_copy_with_little_memory) == ({"copies enqueued": 2, "host wait: copy": 2}, [0, 1, 2, 3, 3])
