"""Training images that are decoded on the device: here the CPU, whose decoder torchvision calls in the same way."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from lockstep.config.schema import AugmentConfig
from lockstep.data import device_decode
from lockstep.data.device_decode import batch_decoder
from lockstep.data.loaders import reader_for
from lockstep.data.readers import Placement
from lockstep.data.sets import Batch, FileSplit, InputSpec
from lockstep.errors import ConfigError, CorruptImageError

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded"),
]
SPEC = InputSpec(3, 24, 24, (0.0,) * 3, (1 / 255,) * 3)  # so that a normalised number is the pixel's
PLAN = [np.array([0, 1, 2, 3]), np.array([4, 5]), np.array([6])]


@pytest.fixture
def split(tmp_path: Path) -> FileSplit:
    """Files of all kinds: JPEG in color, in gray and for print, PNG, and one JPEG that lacks its end."""
    y, x = np.mgrid[0:90, 0:120]
    waves = np.stack([np.sin(x / 9), np.cos(y / 7), np.sin((x + y) / 11)], 2)
    picture = Image.fromarray(np.round(127.5 + 120 * waves).astype(np.uint8))
    paths = []
    for name, mode in (("a.jpg", "RGB"), ("b.jpg", "L"), ("c.png", "RGB"), ("d.jpg", "CMYK"), ("e.jpg", "RGB")):
        paths.append(tmp_path / name)
        picture.rotate(20 * len(paths)).convert(mode).save(paths[-1])
    paths += [tmp_path / "large.jpg", tmp_path / "short.jpg"]
    picture.resize((900, 700)).save(paths[5])
    paths[6].write_bytes(paths[0].read_bytes()[:2000])
    return FileSplit(paths, range(7))


def _read(split: FileSplit, on_device: bool, processes: int = 0, **options: Any) -> list[Batch]:
    augment = AugmentConfig(flip=True)
    reader = reader_for(
        split, SPEC, Placement(torch.device("cpu")), augment, processes=processes, on_device=on_device, **options
    )
    batches = [batch for epoch in range(3) for batch in reader.read(PLAN, epoch)]
    reader.close()
    return batches


@pytest.fixture(params=["torchcodec", "torchvision"])
def decoder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "torchcodec":
        pytest.importorskip("torchcodec")
    else:
        monkeypatch.setitem(sys.modules, "torchcodec.decoders", None)


@pytest.mark.filterwarnings("ignore:The image decoding and encoding capabilities of TorchVision")
@pytest.mark.usefixtures("decoder")
@pytest.mark.parametrize("processes", [0, 2])
def test_the_images_are_those_that_loader_processes_make(split: FileSplit, processes: int) -> None:
    there = _read(split, on_device=True, processes=processes, skip_corrupt=True)
    here = _read(split, on_device=False, skip_corrupt=True)
    for ours, theirs in zip(there, here, strict=True):
        assert torch.equal(ours.labels, theirs.labels)
        difference = (ours.images - theirs.images).abs()
        assert difference.mean() < 0.5  # of 255
        assert (ours.weights is None) == (theirs.weights is None)
    assert there[2].weights is not None
    assert there[2].weights.tolist() == [0]


def test_a_damaged_file_stops_with_its_name(split: FileSplit) -> None:
    with pytest.raises(CorruptImageError, match=r"short\.jpg cannot be decoded"):
        _read(split, on_device=True)


def _refusing(sizes: list[int]) -> Any:
    """A decoder that takes no file of one of `sizes` in bytes."""

    def make(device: torch.device, channels: int) -> Any:
        decode = batch_decoder(device, channels)

        def refuse(files: list[torch.Tensor]) -> list[torch.Tensor]:
            if any(file.numel() in sizes for file in files):
                raise RuntimeError("nvJPEG: unsupported")
            return decode(files)

        return refuse

    return make


def test_images_the_device_refuses_are_decoded_by_the_cpu(
    split: FileSplit, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(device_decode, "batch_decoder", _refusing([split.paths[0].stat().st_size]))
    there, here = (_read(split, on_device, skip_corrupt=True) for on_device in (True, False))
    for ours, theirs in zip(there, here, strict=True):
        assert (ours.images - theirs.images).abs().mean() < 0.5
    assert torch.equal(there[0].images[0], here[0].images[0])
    assert [record.message for record in caplog.records if "the GPU cannot decode" in record.message] == [
        "--decode gpu: the GPU cannot decode an image (nvJPEG: unsupported); the CPU decodes such images"
    ]


def test_a_device_that_decodes_nothing_is_refused_at_once(split: FileSplit, monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(device: torch.device, channels: int) -> Any:
        def decode(files: list[torch.Tensor]) -> list[torch.Tensor]:
            raise RuntimeError("not compiled with nvJPEG support")

        return decode

    monkeypatch.setattr(device_decode, "batch_decoder", lacking)
    with pytest.raises(ConfigError, match=r"not compiled with nvJPEG.*omit --decode gpu"):
        _read(split, on_device=True)


def test_only_plain_files_are_left_to_the_device(split: FileSplit, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []

    def counting(device: torch.device, channels: int) -> Any:
        decode = batch_decoder(device, channels)
        return lambda files: counts.append(len(files)) or decode(files)  # type: ignore[func-returns-value]

    monkeypatch.setattr(device_decode, "batch_decoder", counting)
    _read(split, on_device=True, skip_corrupt=True)
    assert counts == [1, *[2, 2] * 3]  # the first is a trial; not the PNG, the CMYK and the damaged one


@pytest.fixture
def run(new_folder: Callable[..., Path], tmp_path: Path) -> Callable[..., Any]:
    from lockstep.cli import main

    return lambda *flags: main(["train", *flags, "--run-dir", str(tmp_path / "run"), "--max-steps", "1", "-j", "0"])


def test_a_cpu_refuses(run: Callable[..., Any], new_folder: Callable[..., Path], capsys: Any) -> None:
    path = new_folder(sizes=((40, 30), (24, 36)), train=4, val=1)
    assert run(str(path), "--decode", "gpu", "--image-size", "32", "-a", "resnet18") != 0
    assert "--decode gpu: worker 0 runs on cpu" in capsys.readouterr().err


def test_images_in_memory_refuse(run: Callable[..., Any], capsys: Any) -> None:
    assert run("digits", "--decode", "gpu") != 0
    assert (
        "--decode gpu: needs image files that are read during training, but digits has none" in capsys.readouterr().err
    )


@pytest.mark.parametrize("size", [(4000, 3000), (40, 6000), (100, 120)])
def test_no_kernel_shrinks_by_more_than_cuda_can(monkeypatch: pytest.MonkeyPatch, size: tuple[int, int]) -> None:
    factors = []

    def interpolate(images: torch.Tensor, new: tuple[int, int], **named: Any) -> torch.Tensor:
        factors.append(max(old / wanted for old, wanted in zip(images.shape[2:], new, strict=True)))
        return resize(images, new, **named)

    resize = F.interpolate
    monkeypatch.setattr(F, "interpolate", interpolate)
    ramp = torch.linspace(0, 255, size[1]).expand(1, 3, *size)
    resized = device_decode._resize(ramp, 32, 32)
    assert resized.shape == (1, 3, 32, 32)
    assert factors[0] < 92
    torch.testing.assert_close(resized, resize(ramp, (32, 32), mode="bilinear", antialias=True), rtol=0, atol=1.5)
