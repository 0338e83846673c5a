"""The public data sets, read from made-up files of their own forms and from the real MNIST."""

from __future__ import annotations

import gzip
import hashlib
import os
import pickle
import shutil
import struct
import tarfile
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch
from attack import Attack
from torchvision import datasets

from lockstep.config.schema import DataConfig
from lockstep.data import catalog
from lockstep.data.sets import ImageData, MemorySplit
from lockstep.data.sources import torchvision_sets
from lockstep.errors import DataError

IDX_IMAGES, IDX_LABELS = 0x0803, 0x0801


def _pixels(count: int, seed: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 256, (count, 3072), dtype=np.uint8)


def _splits(data: ImageData) -> tuple[MemorySplit, MemorySplit]:
    return data.train, data.val


def _write(root: Path, kind: Any, contents: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write pickles in CIFAR's place, and make torchvision's class expect their checksums."""
    folder = root / kind.base_folder
    folder.mkdir(parents=True, exist_ok=True)
    sums = {}
    for name, content in contents.items():
        (folder / name).write_bytes(pickle.dumps(content, protocol=2))
        sums[name] = hashlib.md5((folder / name).read_bytes()).hexdigest()
    meta = kind.meta["filename"]
    batches = [name for name in contents if name != meta]
    changed = {
        "train_list": [[name, sums[name]] for name in batches if "test" not in name],
        "test_list": [[name, sums[name]] for name in batches if "test" in name],
        "meta": {**kind.meta, "md5": sums[meta]},
    }
    _set(monkeypatch, kind, **changed)
    return folder


def _set(monkeypatch: pytest.MonkeyPatch, kind: Any, **attributes: Any) -> None:
    for name, value in attributes.items():
        monkeypatch.setattr(kind, name, value)


def _cifar10(root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    batches = {f"data_batch_{k}": {"data": _pixels(4, k), "labels": [k, 0, 9, 5]} for k in (1, 2, 3)}
    contents = {
        **batches,
        "test_batch": {"data": _pixels(3, 9), "labels": [2, 1, 0]},
        "batches.meta": {"label_names": [f"name {k}" for k in range(10)]},
    }
    return _write(root, datasets.CIFAR10, contents, monkeypatch)


def test_cifar10s_batches_are_joined_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _cifar10(tmp_path, monkeypatch)
    data = torchvision_sets.load("cifar10", tmp_path, download=False)
    train, val = _splits(data)
    expected = np.concatenate([_pixels(4, k) for k in (1, 2, 3)]).reshape(-1, 3, 32, 32)
    assert np.array_equal(train.images.numpy(), expected)
    assert np.array_equal(val.images.numpy(), _pixels(3, 9).reshape(-1, 3, 32, 32))
    assert train.labels.tolist() == [1, 0, 9, 5, 2, 0, 9, 5, 3, 0, 9, 5]
    assert val.labels.tolist() == [2, 1, 0]
    assert data.classes == tuple(f"name {k}" for k in range(10))
    theirs = datasets.CIFAR10(tmp_path, train=True)
    assert np.array_equal(train.images.permute(0, 2, 3, 1).numpy(), theirs.data)


def test_cifar100_has_its_fine_labels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    contents = {
        "train": {"data": _pixels(3, 1), "fine_labels": [99, 0, 42], "coarse_labels": [1, 2, 3]},
        "test": {"data": _pixels(2, 2), "fine_labels": [7, 8], "coarse_labels": [0, 0]},
        "meta": {"fine_label_names": [str(k) for k in range(100)], "coarse_label_names": ["x"] * 20},
    }
    _write(tmp_path, datasets.CIFAR100, contents, monkeypatch)
    data = torchvision_sets.load("cifar100", tmp_path, download=False)
    assert [split.labels.tolist() for split in _splits(data)] == [[99, 0, 42], [7, 8]]
    assert len(data.classes) == 100


def test_a_hostile_file_in_the_place_of_a_batch_is_not_executed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker = tmp_path / "executed"
    hostile = pickle.dumps(Attack(os.system, f"touch {marker}"))
    folder = _cifar10(tmp_path, monkeypatch)
    (folder / "data_batch_1").write_bytes(hostile)
    with pytest.raises(DataError, match=r"a file is missing or damaged.*lockstep data get cifar10"):
        torchvision_sets.load("cifar10", tmp_path, download=False)
    assert not marker.exists()
    pickle.loads(hostile)
    assert marker.exists()  # it would have been


def test_a_file_with_another_checksum_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = _cifar10(tmp_path, monkeypatch)
    content = (folder / "data_batch_2").read_bytes()
    (folder / "data_batch_2").write_bytes(content[:-20])
    with pytest.raises(DataError, match="lockstep data get cifar10"):
        torchvision_sets.load("cifar10", tmp_path, download=False)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder from which CIFAR-10 is fetched."""

    class Handler(SimpleHTTPRequestHandler):
        def __init__(self, *arguments: Any):
            super().__init__(*arguments, directory=str(tmp_path / "server"))

        def log_message(self, *arguments: Any) -> None:
            pass

    monkeypatch.setenv("no_proxy", "*")
    (tmp_path / "server").mkdir()
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as httpd:
        thread = Thread(target=httpd.serve_forever, args=(0.01,))
        thread.start()
        _set(monkeypatch, datasets.CIFAR10, url=f"http://127.0.0.1:{httpd.server_port}/cifar.tar.gz")
        yield tmp_path / "server"
        httpd.shutdown()
        thread.join()


@pytest.mark.filterwarnings("ignore:Python 3.14 will, by default, filter extracted tar")  # torchvision unpacks it
def test_a_missing_set_is_fetched_and_then_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: Path) -> None:
    batches = _cifar10(tmp_path / "made-up", monkeypatch)
    archive = server / "cifar.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(batches, arcname=batches.name)
    _set(monkeypatch, datasets.CIFAR10, tgz_md5=hashlib.md5(archive.read_bytes()).hexdigest())
    fetched = torchvision_sets.load("cifar10", tmp_path / "new" / "here", download=True)
    archive.unlink()
    again = torchvision_sets.load("cifar10", tmp_path / "new" / "here", download=True)
    expected = torchvision_sets.load("cifar10", tmp_path / "made-up", download=False)
    for parts in zip(_splits(fetched), _splits(again), _splits(expected), strict=True):
        assert torch.equal(parts[0].images, parts[2].images)
        assert torch.equal(parts[1].labels, parts[2].labels)


@pytest.mark.filterwarnings("ignore:Implicitly cleaning up <HTTPError")  # which torchvision keeps, with Python 3.14
@pytest.mark.parametrize("there", [False, True], ids=["not there", "another file"])
def test_failed_download_is_an_error_with_a_fix(tmp_path: Path, server: Path, there: bool) -> None:
    if there:
        (server / "cifar.tar.gz").write_bytes(b"an error page")
    with pytest.raises(DataError, match=f"lockstep data get cifar10 --data-dir {tmp_path}"):
        torchvision_sets.load("cifar10", tmp_path, download=True)


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist", "cifar10", "cifar100"])
def test_missing_set_names_the_command_that_fetches_it(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match=f"lockstep data get {name} --data-dir {tmp_path}"):
        catalog.load(DataConfig(dataset=name, data_dir=tmp_path), download=False)
    assert list(tmp_path.rglob("*")) == []


def _tiny_mnist(root: Path, kind: str = "MNIST") -> Path:
    """Four unpacked files in MNIST's form, with 5 training and 3 test digits."""
    raw = root / kind / "raw"
    raw.mkdir(parents=True)
    for prefix, count in (("train", 5), ("t10k", 3)):
        pixels = np.random.default_rng(count).integers(0, 256, (count, 28, 28), dtype=np.uint8)
        header = struct.pack(">4I", IDX_IMAGES, count, 28, 28)
        (raw / f"{prefix}-images-idx3-ubyte").write_bytes(header + pixels.tobytes())
        (raw / f"{prefix}-labels-idx1-ubyte").write_bytes(struct.pack(">2I", IDX_LABELS, count) + bytes(range(count)))
    return raw


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_unpacked_files_are_enough(tmp_path: Path, name: str) -> None:
    _tiny_mnist(tmp_path, {"mnist": "MNIST", "fashion-mnist": "FashionMNIST"}[name])
    data = torchvision_sets.load(name, tmp_path, download=False)
    train, val = _splits(data)
    assert np.array_equal(
        train.images.numpy(), np.random.default_rng(5).integers(0, 256, (5, 1, 28, 28), dtype=np.uint8)
    )
    assert (train.labels.tolist(), val.labels.tolist()) == ([0, 1, 2, 3, 4], [0, 1, 2])
    assert len(data.classes) == 10
    assert data.classes[0] == {"mnist": "0", "fashion-mnist": "T-shirt/top"}[name]


@pytest.mark.parametrize("keep", [0, 10, 2000], ids=["empty", "cut in the header", "cut in the pixels"])
def test_damaged_unpacked_file_is_an_error_with_a_fix(tmp_path: Path, keep: int) -> None:
    file = _tiny_mnist(tmp_path) / "train-images-idx3-ubyte"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(DataError, match="mnist"):
        torchvision_sets.load("mnist", tmp_path, download=False)


def test_the_real_mnist_is_unpacked_without_a_network(tmp_path: Path, shared_data: Path) -> None:
    shutil.copytree(shared_data / "MNIST", tmp_path / "MNIST")
    for path in tmp_path.rglob("*"):
        path.chmod(0o755)
    data = torchvision_sets.load("mnist", tmp_path, download=False)
    for split, train, count in zip(_splits(data), (True, False), (60_000, 10_000), strict=True):
        theirs = datasets.MNIST(tmp_path, train=train)
        assert split.images.shape == (count, 1, 28, 28)
        assert torch.equal(split.images[:, 0], theirs.data)
        assert torch.equal(split.labels, theirs.targets)
    pixels = _splits(data)[0].images.double() / 255
    assert data.input.mean == pytest.approx([float(pixels.mean())], abs=1e-3)
    assert data.input.std == pytest.approx([float(pixels.std())], abs=1e-3)
    assert data.classes == tuple("0123456789")


def test_damaged_archive_is_an_error_with_a_fix(tmp_path: Path) -> None:
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    (raw / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(b"something else"))
    with pytest.raises(DataError, match="lockstep data get mnist"):
        torchvision_sets.load("mnist", tmp_path, download=False)
