"""Batches made while training runs, in this process and in loader processes."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from signal import SIGKILL
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import DataLoader

from lockstep.config.schema import AugmentConfig, DataConfig
from lockstep.data import loader_processes
from lockstep.data.decode import evaluation_pixels
from lockstep.data.loader_processes import as_it_is
from lockstep.data.loaders import reader_for
from lockstep.data.readers import Placement
from lockstep.data.sets import Batch, FileSplit, InputSpec, UserSplit
from lockstep.data.sharding import Indices
from lockstep.data.sources import image_folder
from lockstep.data.stream_reader import BATCHES_UNDER_WAY, SharedRing, StreamReader
from lockstep.errors import CorruptImageError, DataError, LoaderError

# What torch says of any loader process on a small machine.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

SPEC = InputSpec(3, 12, 16, (0.5, 0.4, 0.3), (0.2, 0.3, 0.4), crop_ratio=0.875)
PLAN = [np.array(samples) for samples in ([3, 0, 7], [1, 2], [9, 9, 4], [5], [8, 6])]
BOTH = pytest.mark.parametrize("processes", [0, 2])


@pytest.fixture
def split(new_folder: Callable[..., Path]) -> FileSplit:
    """Ten photographs of three sizes."""
    path = new_folder(sizes=((40, 30), (24, 36), (31, 31)), train=5, val=1)
    data = image_folder.load(path, DataConfig(dataset=str(path), in_memory="never"))
    return data.train


def _reader(split: FileSplit | UserSplit, processes: int = 0, flip: bool = True, skip_corrupt: bool = False) -> Any:
    options: dict[str, Any] = {"seed": 1, "processes": processes, "skip_corrupt": skip_corrupt}
    return reader_for(split, SPEC, Placement(torch.device("cpu")), AugmentConfig(flip=flip), **options)


def _read(reader: StreamReader, epoch: int | None, plan: list[Indices] = PLAN) -> list[Batch]:
    return list(reader.read(plan, epoch))


def _same(ours: list[Batch], theirs: list[Batch]) -> bool:
    return len(ours) == len(theirs) and all(
        torch.equal(a.images, b.images) and torch.equal(a.labels, b.labels) for a, b in zip(ours, theirs, strict=True)
    )


def _spoil(path: Path) -> str:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    return str(path)


@BOTH
def test_evaluation_sees_the_normalized_center_of_each_image(split: FileSplit, processes: int) -> None:
    batches = _read(_reader(split, processes), epoch=None)
    mean, std = np.array(SPEC.mean), np.array(SPEC.std)
    for samples, batch in zip(PLAN, batches, strict=True):
        assert batch.weights is None
        assert batch.labels.tolist() == [split.labels[sample] for sample in samples]
        for sample, image in zip(samples, batch.images, strict=True):
            pixels = evaluation_pixels(split.paths[sample], SPEC)
            expected = torch.from_numpy((pixels / 255 - mean) / std).permute(2, 0, 1)
            assert torch.allclose(image.double(), expected, atol=1e-5)


def test_augmentation_depends_only_on_epoch_and_image_number(split: FileSplit) -> None:
    reader = _reader(split)
    one_plan, other_plan = [np.array([4, 1])], [np.array([0, 1]), np.array([2, 4, 4])]
    (first,), (second, third) = _read(reader, 3, one_plan), _read(reader, 3, other_plan)
    assert torch.equal(first.images[0], third.images[1])
    assert torch.equal(first.images[1], second.images[1])
    seen = torch.stack([_read(reader, epoch, one_plan)[0].images[0] for epoch in range(8)])
    assert len(seen.unique(dim=0)) == 8


def test_flip_mirrors_every_second_image(split: FileSplit) -> None:
    """With the same crops, an image is either the same with and without --flip, or mirrored."""
    plan = [np.arange(10)] * 8
    straight, flipped = (_reader(split, flip=flip) for flip in (False, True))
    mirrored = 0
    for epoch in range(8):
        before, after = (_read(reader, epoch, plan[:1])[0].images for reader in (straight, flipped))
        same = (after == before).flatten(1).all(1)
        reverse = (after == before.flip(3)).flatten(1).all(1)
        assert (same ^ reverse).all()
        mirrored += int(reverse.sum())
    assert 25 < mirrored < 55  # of 80


def test_alternate_flips_show_the_other_side_in_the_next_epoch(split: FileSplit) -> None:
    """The crops change from epoch to epoch, so each epoch is compared with its own without flips."""
    straight = _reader(split, flip=False)
    config = AugmentConfig(flip=True, flip_alternate=True)
    flipped = reader_for(split, SPEC, Placement(torch.device("cpu")), config, seed=1)
    mirrored = []
    for epoch in range(3):
        before, after = (_read(reader, epoch, [np.arange(10)])[0].images for reader in (straight, flipped))
        mirrored.append((after == before.flip(3)).flatten(1).all(1))
        assert (mirrored[-1] ^ (after == before).flatten(1).all(1)).all()
    assert torch.equal(mirrored[0], ~mirrored[1])
    assert torch.equal(mirrored[0], mirrored[2])
    assert 0 < mirrored[0].sum() < 10
    assert torch.equal(_read(straight, None)[0].images, _read(flipped, None)[0].images)


@BOTH
def test_a_damaged_image_stops_with_its_name(split: FileSplit, processes: int) -> None:
    spoiled = _spoil(split.paths[4])
    reader = _reader(split, processes)
    for epoch in (0, None):
        with pytest.raises(CorruptImageError, match=f"^{spoiled} cannot be decoded") as caught:
            _read(reader, epoch)
        assert "\n" not in str(caught.value)  # one line, not the loader process's traceback
    reader.close()


@BOTH
def test_skip_corrupt_lists_damaged_images_without_weight(split: FileSplit, processes: int) -> None:
    whole = {epoch: _read(_reader(split), epoch) for epoch in (0, None)}
    spoiled = {_spoil(split.paths[4]), _spoil(split.paths[1])}
    split.paths[5].unlink()
    reader = _reader(split, processes, skip_corrupt=True)
    for epoch in (0, None):
        batches = _read(reader, epoch)
        weights = [None if batch.weights is None else batch.weights.tolist() for batch in batches]
        assert weights == [None, [0, 1], [1, 1, 0], [0], None]
        for batch, before in zip(batches, whole[epoch], strict=True):
            good = slice(None) if batch.weights is None else batch.weights > 0
            assert torch.equal(batch.images[good], before.images[good])
            assert torch.equal(batch.labels, before.labels)
            assert torch.isfinite(batch.images).all()
    assert reader.left_out == spoiled | {str(split.paths[5])}
    reader.close()


def _children() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


@BOTH
@pytest.mark.parametrize("left", ["after a pass", "within a pass", "after an error"])
def test_close_ends_the_loader_processes(split: FileSplit, processes: int, left: str) -> None:
    before = _children()
    items = [(torch.zeros(3, 12, 16), 0)] * 9 + ["no item"]
    reader = _reader(UserSplit(items) if left == "after an error" else split, processes)
    batches = reader.read(PLAN, 0)
    error = None
    next(batches)
    if left == "after a pass":
        list(batches)
    if left == "after an error":
        with pytest.raises(DataError) as error:
            list(batches)
    assert len(_children() - before) == processes
    reader.close()
    assert _children() <= before
    reader.close()  # twice does no harm
    del batches, error  # which outlived the processes


@BOTH
def test_custom_images_are_scaled_only_if_they_are_bytes(processes: int) -> None:
    pixels = torch.randint(0, 256, (10, 3, 12, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    numbers = torch.randn(10, 3, 12, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    spec = InputSpec(3, 12, 16, (0.0,) * 3, (1.0,) * 3)
    for images, expected in ((pixels, pixels.double() / 255), (numbers, numbers)):
        split = UserSplit([(image, number % 3) for number, image in enumerate(images)])
        reader = reader_for(
            split, spec, Placement(torch.device("cpu"), torch.float64), AugmentConfig(flip=True), processes=processes
        )
        for epoch in (0, None):
            for samples, batch in zip(PLAN, reader.read(PLAN, epoch), strict=True):
                assert batch.images.dtype == torch.float64
                assert torch.allclose(batch.images, expected[samples], atol=1e-12)
                assert batch.labels.tolist() == (samples % 3).tolist()
        reader.close()


@BOTH
@pytest.mark.parametrize(
    "odd",
    [(torch.zeros(3, 12, 17), 0), (torch.zeros(3, 12, 16),), (np.zeros((3, 12, 16)), 0)],
    ids=["another size", "no label", "an array"],
)
def test_users_items_that_make_no_batch_are_named(processes: int, odd: Any) -> None:
    items: list[Any] = [(torch.zeros(3, 12, 16), 0)] * 10
    items[4] = odd
    reader = _reader(UserSplit(items), processes)
    with pytest.raises(
        DataError, match=r"items \[9, 9, 4\]... of the data set cannot be batched as \(inputs, target\).*collate_fn="
    ):
        _read(reader, 0)
    reader.close()


@BOTH
@pytest.mark.parametrize("label", [0.3, -1, -100, 3, "cat", torch.eye(9)[0]], ids=str)
@pytest.mark.parametrize(("epoch", "role"), [(0, "training"), (None, "validation")])
def test_users_labels_that_are_no_class_are_named(processes: int, label: Any, epoch: int | None, role: str) -> None:
    items: list[Any] = [(torch.zeros(3, 12, 16), np.int64(2))] * 10
    items[4] = (items[0][0], label)
    reader = _reader(UserSplit(items, classes=3), processes)
    with pytest.raises(DataError, match=rf"^item 4 of the {role} set has label .*: must be an integer from 0 to 2$"):
        _read(reader, epoch)
    reader.close()


@BOTH
def test_an_older_pass_cannot_go_on_beside_a_new_one(split: FileSplit, processes: int) -> None:
    reader = _reader(split, processes)
    older = reader.read(PLAN, 0)
    next(older)
    newer = reader.read(PLAN, 1)
    first = next(newer)
    with pytest.raises(DataError, match="another pass over these images has started"):
        next(older)
    expected = _read(_reader(split), 1)
    assert _same([first, *newer], expected)
    reader.close()


class _Broken:
    """A set of the user's own whose item 4 calls `act`."""

    def __init__(self, act: Callable[[], object]):
        self._act = act

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index == 4:
            self._act()
        return torch.zeros(3, 12, 16), 0


def _fail() -> None:
    raise RuntimeError("no such transform")


def _reset(*_: object) -> None:
    raise ConnectionResetError("Connection reset by peer")


@BOTH
@pytest.mark.parametrize(
    ("act", "kind", "text"),
    [(_fail, RuntimeError, "no such transform"), (_reset, ConnectionResetError, "Connection reset by peer")],
    ids=["an error", "a lost connection"],
)
def test_error_in_a_custom_set_shows_what_the_user_raised(
    processes: int, act: Callable[[], object], kind: type[Exception], text: str
) -> None:
    reader = _reader(UserSplit(_Broken(act)), processes)
    with pytest.raises(kind, match=text):
        _read(reader, 0)
    reader.close()


@pytest.mark.parametrize("act", [lambda: os._exit(1), lambda: os.kill(os.getpid(), SIGKILL)], ids=["exit", "kill"])
def test_dead_loader_process_is_an_error_with_a_fix(act: Callable[[], object]) -> None:
    """As when the kernel ends it for want of memory."""
    reader = _reader(UserSplit(_Broken(act)), processes=2)
    with pytest.raises(LoaderError, match=r"a loader process exited.*--workers"):
        _read(reader, 0)
    reader.close()


def test_a_loader_process_that_cannot_send_is_an_error_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the thread that sends fails: the process itself would live on."""

    dumps = ForkingPickler.dumps

    def refuse(obj: object) -> Any:
        if multiprocessing.parent_process():
            raise OSError("AF_UNIX path too long")
        return dumps(obj)

    monkeypatch.setattr(ForkingPickler, "dumps", refuse)
    reader = _reader(UserSplit(_Broken(int)), processes=1)
    with pytest.raises(LoaderError, match=r"a loader process exited .*--workers"):
        _read(reader, 0)
    reader.close()


def test_a_temporary_folder_may_have_a_longer_name_than_a_socket(split: FileSplit, temporary_files: Path) -> None:
    reader = _reader(split, processes=2)
    assert len(_read(reader, 0)) == len(PLAN)
    reader.close()
    assert not list(temporary_files.iterdir())


def _end_early(*_: object) -> None:
    raise EOFError("no more")


def _lose_the_thread(*_: object) -> None:
    raise RuntimeError("Pin memory thread exited unexpectedly")  # torch's words, on a GPU


def _kill(*_: object) -> None:
    """End the loader process; torch reports its exit in a signal handler, after the end of the connection is seen."""
    newest = max(multiprocessing.active_children(), key=lambda child: child.pid or 0)
    newest.kill()
    raise EOFError


def _read_and_wait(reader: Any) -> None:
    try:
        _read(reader, 0)
    finally:
        time.sleep(0.2)  # an exit that is reported again would raise here


@pytest.mark.parametrize("end", [_reset, _end_early, _lose_the_thread, _kill])
def test_loader_process_dying_while_sending_is_the_same_error(
    monkeypatch: pytest.MonkeyPatch, end: Callable[..., None]
) -> None:
    reader = _reader(UserSplit(_Broken(int)), processes=1)
    monkeypatch.setattr("torch.multiprocessing.reductions.rebuild_storage_fd", end)
    with pytest.raises(LoaderError, match=r"a loader process exited.*--workers"):
        _read_and_wait(reader)
    reader.close()


class _Counting:
    """Batch number n is full of n's."""

    def __init__(self) -> None:
        self._ring = SharedRing()

    def __getitems__(self, numbers: list[int]) -> torch.Tensor:
        assert not self._ring._buffers or all(buffer.is_shared() for buffer in self._ring._buffers)
        return self._ring.take((1000, 1000 + numbers[0] % 3)).fill_(numbers[0])


@pytest.mark.parametrize("processes", [0, 1, 2])
def test_a_batch_stays_as_it_is_until_the_next_one_is_asked_for(processes: int) -> None:
    loader: DataLoader[torch.Tensor] = DataLoader(
        _Counting(),  # type: ignore[arg-type]
        batch_sampler=[[number] for number in range(40)],
        num_workers=processes,
        collate_fn=as_it_is,
    )
    places = set()
    for number, batch in enumerate(loader):
        assert batch.shape == (1000, 1000 + number % 3)
        assert np.unique(batch.numpy()).tolist() == [number]
        places.add(batch.data_ptr())
    if processes:
        assert len(places) <= 3 * processes * BATCHES_UNDER_WAY  # three sizes, each with a new ring at most


def test_loader_process_returns_freed_memory(split: FileSplit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader_processes, "return_freed_memory", (tmp_path / "returned").touch)
    reader = _reader(split, processes=1)
    _read(reader, 0)
    reader.close()
    assert (tmp_path / "returned").exists()


class _Changing:
    """A custom data set that a callback changes between epochs."""

    level = 0.0

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((1, 4, 4), self.level), index


@pytest.mark.parametrize("processes", [0, 1])
def test_custom_data_set_may_change_between_passes(processes: int) -> None:
    data = _Changing()
    reader = _reader(UserSplit(data), processes)
    for level in (1.0, 2.0):
        data.level = level
        (batch,) = reader.read([np.arange(2)], epoch=0)
        assert set(batch.images.flatten().tolist()) == {level}
    reader.close()
