"""Reading a pack: it trains like the folder that it came from, and damage is named."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import run
from packs import pack_folder
from PIL import Image

from lockstep.config.schema import AugmentConfig, DataConfig
from lockstep.data import catalog, inspection, pack_writer
from lockstep.data.inspection import describe
from lockstep.data.loaders import TrainLoader, reader_for
from lockstep.data.pack_writer import Encoding
from lockstep.data.readers import Placement
from lockstep.data.sets import Batch, ImageData
from lockstep.data.sharding import Sharding
from lockstep.data.sources.pack_reader import Manifest, PackedSplit, is_packed, splits
from lockstep.errors import ConfigError, CorruptImageError, DataError

NewFolder = Callable[..., Path]


@pytest.fixture
def packed(folder: Path, tmp_path: Path) -> Path:
    return pack_folder(folder, tmp_path / "packed")


def _load(path: Path, **settings: Any) -> ImageData:
    return catalog.load(DataConfig(dataset=str(path), **settings))


def _batches(data: ImageData, processes: int, skip_corrupt: bool = False) -> list[Batch]:
    device = torch.device("cpu")
    reader = reader_for(
        data.train, data.input, Placement(device), AugmentConfig(), processes=processes, skip_corrupt=skip_corrupt
    )
    loader = TrainLoader(reader, Sharding(len(data.train), 16, 0, 1, 0, False), device)
    try:
        return [batch for epoch in (0, 1) for batch in loader.epoch(epoch)]
    finally:
        reader.close()


@pytest.mark.parametrize("processes", [0, 2])
def test_training_batches_are_the_folders_to_the_bit(folder: Path, packed: Path, processes: int) -> None:
    settings: dict[str, Any] = {"in_memory": "never", "image_size": 24}
    theirs, ours = _load(folder, **settings), _load(packed, **settings)
    assert (ours.name, ours.classes, ours.input) == (theirs.name, theirs.classes, theirs.input)
    for a, b in zip(_batches(theirs, processes), _batches(ours, processes), strict=True):
        assert torch.equal(a.images, b.images)
        assert torch.equal(a.labels, b.labels)


def test_small_images_are_held_in_memory_as_the_folders_are(folder: Path, packed: Path) -> None:
    theirs, ours = _load(folder), _load(packed)
    assert ours.input == theirs.input
    for a, b in ((theirs.train, ours.train), (theirs.val, ours.val)):
        assert torch.equal(a.images, b.images)
        assert torch.equal(a.labels, b.labels)


@pytest.mark.parametrize("settings", [{}, {"in_memory": "never", "image_size": 24}])
def test_pack_keeps_the_bits_of_deep_images(tmp_path: Path, settings: dict[str, Any]) -> None:
    for split in ("train", "val"):
        (tmp_path / "deep" / split / "a").mkdir(parents=True)
        Image.new("I;16", (24, 24), 2000).save(tmp_path / "deep" / split / "a" / "x.png")
    packed = pack_folder(tmp_path / "deep", tmp_path / "packed", Encoding(bits=12))
    assert (Manifest.read(packed).bits, describe(packed).notes) == (12, [])
    theirs, ours = _load(tmp_path / "deep", bits=12, **settings), _load(packed, **settings)
    assert (ours.input, ours.notes) == (theirs.input, [])
    assert ours.input.bits == 12
    for batch in (*_batches(theirs, 0), *_batches(ours, 0)):
        pixels = batch.images[0, 0] * ours.input.std[0] + ours.input.mean[0]
        assert pixels.mul(255).round().unique().tolist() == [125]
    assert _load(packed, bits=11, **settings).input.bits == 11


def test_bits_of_a_damaged_manifest_are_refused(tmp_path: Path, packed: Path) -> None:
    path = packed / "dataset.json"
    content = json.loads(path.read_text())
    content["settings"]["bits"] = 10**9
    path.write_text(json.dumps(content))
    with pytest.raises(DataError, match="invalid bits: 1000000000"):
        _load(packed)


def test_a_split_travels_to_other_processes_without_its_index(packed: Path) -> None:
    train, _ = splits(packed, Manifest.read(packed))
    sent = pickle.dumps(train)
    assert len(sent) < 1000 + 200 * len(train.shards)
    received: PackedSplit = pickle.loads(sent)
    assert [bytes(received.read(i)) for i in range(40)] == [bytes(train.read(i)) for i in range(40)]


def _overwrite(packed: Path, sample: int, split: str = "train") -> str:
    """Damage one image's first bytes; returns its name."""
    part = PackedSplit(packed / split, Manifest.read(packed).splits[split].shards)
    row = part.index[sample]
    with (packed / split / part.shards[row["shard"]].file).open("r+b") as file:
        file.seek(int(row["offset"]))
        file.write(bytes(20))
    return part.name(sample)


def test_a_damaged_image_stops_with_its_name_or_is_left_out(packed: Path) -> None:
    name = _overwrite(packed, 21)
    assert name.endswith("!red/001.png")
    with pytest.raises(CorruptImageError) as caught:
        _load(packed)
    assert str(caught.value).startswith(name)
    assert "--skip-corrupt" in str(caught.value)
    data = _load(packed, skip_corrupt=True)
    assert (len(data.train), data.left_out) == (39, [name])
    stream = _load(packed, in_memory="never", image_size=16)
    with pytest.raises(CorruptImageError) as caught:
        _batches(stream, 0)
    assert str(caught.value).startswith(name)
    weights = [batch.weights for batch in _batches(stream, 0, skip_corrupt=True) if batch.weights is not None]
    assert [float((weight == 0).sum()) for weight in weights] == [1, 1]  # once an epoch


def _cut(packed: Path) -> str:
    path = packed / "train" / "train-000001.tar"
    path.write_bytes(path.read_bytes()[:-1000])
    return f"{path} has .* bytes instead of"


def _remove(packed: Path) -> str:
    (packed / "val" / "val-000000.tar").unlink()
    return "val-000000.tar cannot be read"


def _cut_index(packed: Path) -> str:
    path = packed / "train" / "index.npy"
    path.write_bytes(path.read_bytes()[:-100])
    return f"{path}"


def _other_index(packed: Path) -> str:
    (packed / "train" / "index.npy").write_bytes((packed / "val" / "index.npy").read_bytes())
    return "does not match the 40 samples"


def _manifest(change: Callable[[dict[str, Any]], object], words: str) -> Callable[[Path], str]:
    def act(packed: Path) -> str:
        path = packed / "dataset.json"
        values = json.loads(path.read_text())
        change(values)
        path.write_text(json.dumps(values))
        return words

    return act


def _first(values: dict[str, Any]) -> dict[str, Any]:
    shard: dict[str, Any] = values["splits"]["train"]["shards"][0]
    return shard


def _index(field: str, value: int, words: str, is_told: bool = True) -> Callable[[Path], str]:
    """Change a sample's row; `is_told`: and the index's sum, as deliberate damage does."""

    def act(packed: Path) -> str:
        path = packed / "train" / "index.npy"
        index = np.load(path)
        index[field][3] = value
        np.save(path, index)
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        _manifest(lambda values: values["splits"]["train"].update(index_sha256=digest), "")(packed)
        return words

    def act_alone(packed: Path) -> str:
        told = (packed / "dataset.json").read_bytes()
        act(packed)
        (packed / "dataset.json").write_bytes(told)
        return words

    return act if is_told else act_alone


def _empty_manifest(packed: Path) -> str:
    (packed / "dataset.json").write_text("")
    return "is a damaged pack"


@pytest.mark.parametrize(
    "spoil",
    [
        _cut,
        _remove,
        _cut_index,
        _other_index,
        _manifest(lambda values: values.update(version=2), "update Lockstep"),
        _manifest(lambda values: values.pop("classes"), "dataset.json is damaged"),
        _manifest(lambda values: values.update(splits={}), "dataset.json is damaged"),
        _manifest(lambda values: values.update(classes=["one"]), "labels outside the range of classes"),
        _manifest(lambda values: values.update(classes=[1, 2]), "dataset.json is damaged"),
        _manifest(
            lambda values: _first(values).update(samples="x"),
            r"dataset.json is damaged \(dataset.json: splits.train.shards.0.samples is 'x', but must be a whole number",
        ),
        _manifest(lambda values: _first(values).update(file=5), "splits.train.shards.0.file is 5"),
        _manifest(lambda values: _first(values).pop("file"), "dataset.json is damaged .* argument: 'file'"),
        _manifest(lambda values: _first(values).update(file="../val/val-000000.tar"), "dataset.json is damaged"),
        _index("label", -5, "labels outside the range of classes"),
        _index("shard", 1, "lists samples in a different order"),
        _index("label", 1, "does not match its checksum", is_told=False),
        _empty_manifest,
    ],
)
def test_a_damaged_pack_is_refused_by_name(packed: Path, spoil: Callable[[Path], str]) -> None:
    words = spoil(packed)
    for read in (_load, describe):
        with pytest.raises(DataError, match=words):
            read(packed)
    with pytest.raises(DataError, match=words):
        raise DataError("\n".join(inspection.run(inspection.plan(packed), 1, lambda count: None)))


def test_a_pack_without_its_description_is_not_packed_over(folder: Path, packed: Path) -> None:
    words = _empty_manifest(packed)
    with pytest.raises(ConfigError, match="already exists"):
        pack_folder(folder, packed)
    with pytest.raises(DataError, match=words):
        inspection.plan(packed)


def test_folder_with_a_foreign_dataset_json_is_a_folder(folder: Path) -> None:
    (folder / "dataset.json").write_text('{"license": "none"}')
    assert not is_packed(folder)
    assert len(_load(folder).train) == 40


def test_more_shards_than_files_may_be_open_at_first(folder: Path, tmp_path: Path) -> None:
    plan = pack_writer.make_plan(folder, tmp_path / "many", Encoding(), 1)  # one image each
    pack_writer.write(plan, 1, lambda count: None)
    code = (
        "import resource, sys\nfrom pathlib import Path\nfrom lockstep.data.sources.pack_reader import *\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (20, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))\n"
        "train, _ = splits(Path(sys.argv[1]), Manifest.read(Path(sys.argv[1])))\n"
        "assert len(train.shards) == 40 and all(train.read(sample) for sample in range(40))"
    )
    done = run([sys.executable, "-c", code, tmp_path / "many"], tmp_path)
    assert done.returncode == 0, done.stderr


def test_too_few_files_that_may_be_open_are_not_corrupt_images(folder: Path, tmp_path: Path) -> None:
    pack_writer.write(pack_writer.make_plan(folder, tmp_path / "many", Encoding(), 1), 1, lambda count: None)
    code = (
        "import resource, sys\nfrom pathlib import Path\nfrom lockstep.data.sources.pack_reader import *\n"
        "from lockstep.data.decode import decode\nfrom lockstep.errors import *\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (20, 20))\n"
        "train, _ = splits(Path(sys.argv[1]), Manifest.read(Path(sys.argv[1])))\n"
        "try: [decode(train.image(sample), 3) for sample in range(40)]\n"
        "except DataError as e: assert not isinstance(e, CorruptImageError) and 'ulimit -n' in str(e), e\n"
        "else: assert False"
    )
    done = run([sys.executable, "-c", code, tmp_path / "many"], tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_header_that_pillow_chokes_on_is_an_unreadable_image(folder: Path) -> None:
    """Pillow raises ValueError where a PNG's header is too short."""
    path = folder / "train" / "red" / "000.png"
    content = path.read_bytes()
    path.write_bytes(content[:8] + bytes(4) + content[12:])
    assert describe(folder).splits[0].unreadable == 1
    assert len(_load(folder, skip_corrupt=True).train) == 39


@pytest.mark.parametrize("processes", [0, 2])
def test_lost_shard_stops_training_even_if_corrupt_images_do_not(packed: Path, processes: int) -> None:
    data = _load(packed, in_memory="never", image_size=16)
    (packed / "train" / "train-000002.tar").unlink()
    with pytest.raises(DataError, match=r"^\S*train-000002\.tar cannot be read") as caught:
        _batches(data, processes, skip_corrupt=True)
    assert not isinstance(caught.value, CorruptImageError)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # it leaves its files open
def test_webdataset_itself_reads_the_shards(packed: Path) -> None:
    if importlib.util.find_spec("webdataset") is None:
        pytest.skip("webdataset is not installed")
    import webdataset

    shards = sorted(str(path) for path in (packed / "train").glob("*.tar"))
    samples = list(webdataset.WebDataset(shards, shardshuffle=False).decode("pil"))
    assert [sample["__key__"] for sample in samples][:2] == ["blue/000", "blue/001"]
    assert [sample["cls"] for sample in samples] == [0] * 20 + [1] * 20
