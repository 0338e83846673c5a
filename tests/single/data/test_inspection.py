"""Verifying: each kind of damage is found and named, and nothing else is."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from packs import pack_folder

from lockstep.data import inspection
from lockstep.data.inspection import describe
from lockstep.data.sources.pack_reader import ROW, Manifest, splits
from lockstep.errors import DataError


@pytest.fixture
def packed(folder: Path, tmp_path: Path) -> Path:
    return pack_folder(folder, tmp_path / "packed")


def _verify(path: Path, processes: int = 1) -> list[str]:
    done: list[int] = []
    plan = inspection.plan(path)
    bad = inspection.run(plan, processes, done.append)
    assert sum(done) == plan.samples == 50
    return bad


def _flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        value = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([value ^ 1]))


def test_whole_sets_have_nothing_to_report(folder: Path, packed: Path) -> None:
    assert _verify(folder) == []
    assert _verify(packed) == []


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.cold)])
def test_one_changed_bit_of_an_image_names_the_image(packed: Path, processes: int) -> None:
    train, _ = splits(packed, Manifest.read(packed))
    row = train.index[25]
    _flip(packed / "train" / train.shards[row["shard"]].file, int(row["offset"]) + 300)
    (line,) = _verify(packed, processes)
    assert line.startswith(train.name(25))
    assert "has changed" in line


def test_changes_outside_images_are_found_too(packed: Path) -> None:
    _flip(packed / "train" / "train-000000.tar", 0)  # the first header
    index = packed / "val" / "index.npy"
    _flip(index, index.stat().st_size - ROW.itemsize + 4)  # the last label
    lines = _verify(packed)
    assert [line.split(" ")[0] for line in lines] == [f"{packed}/val/index.npy", f"{packed}/train/train-000000.tar"]


def test_a_changed_image_is_named_beside_a_cut_shard(packed: Path) -> None:
    train, _ = splits(packed, Manifest.read(packed))
    name, cut = train.name(0), packed / "train" / "train-000001.tar"
    _flip(packed / "train" / "train-000000.tar", int(train.index[0]["offset"]) + 300)
    cut.write_bytes(cut.read_bytes()[:-512])
    lines = _verify(packed)
    assert [line.partition(" ")[0] for line in lines] == [name, str(cut)]


def test_another_index_is_one_line_and_shards_are_still_compared(packed: Path) -> None:
    np.save(packed / "train" / "index.npy", np.zeros(40))
    (line,) = _verify(packed)
    assert line == f"{packed}/train/index.npy does not match the 40 samples of its shards; copy it again, or repack"
    _flip(packed / "train" / "train-000000.tar", 2000)
    assert _verify(packed) == [line, f"{packed}/train/train-000000.tar has changed since it was packed"]


def test_shard_that_shrinks_while_read_does_not_kill_the_process(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Path.open

    def cut_and_open(path: Path, mode: str) -> Any:
        os.truncate(packed / "train" / "train-000000.tar", 0)
        return opened(path, mode)

    plan = inspection.plan(packed)
    monkeypatch.setattr(Path, "open", cut_and_open)
    bad = inspection.run(plan, 1, lambda count: None)
    assert all("train-000000.tar" in line for line in bad)
    assert bad


def test_images_of_a_folder_that_cannot_be_decoded_are_named(folder: Path) -> None:
    spoiled = [folder / "train" / "red" / "003.png", folder / "val" / "blue" / "001.png"]
    for path in spoiled:
        path.write_bytes(path.read_bytes()[:200])
    lines = _verify(folder)
    assert [line.split(" ")[0] for line in lines] == [str(path) for path in spoiled]


def test_invalid_data_set_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(DataError, match=str(path)):
            inspection.plan(path)


def test_a_folder_and_its_pack_are_described_alike(folder: Path, packed: Path) -> None:
    theirs, ours = describe(folder), describe(packed)
    assert (theirs.manifest, ours.classes) == (None, theirs.classes)
    for a, b in zip(theirs.splits, ours.splits, strict=True):
        assert (a.samples, a.size_bytes, a.class_sizes, a.forms) == (b.samples, b.size_bytes, b.class_sizes, b.forms)
        assert a.short_sides == b.short_sides == (12, 12, 12)
        assert a.long_sides == b.long_sides == (16, 16, 16)
    assert [split.samples for split in ours.splits] == [40, 10]
    assert ours.splits[0].size_bytes == sum(path.stat().st_size for path in (folder / "train").rglob("*.png"))
