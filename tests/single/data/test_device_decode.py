"""Training images that are decoded on the device: here the CPU, whose decoder torchvision calls in the same way."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch.overrides import TorchFunctionMode

from lockstep.config.schema import AugmentConfig
from lockstep.data import device_decode
from lockstep.data.device_decode import batch_decoder
from lockstep.data.loaders import reader_for
from lockstep.data.readers import Placement
from lockstep.data.sets import Batch, FileSplit, InputSpec
from lockstep.errors import ConfigError, CorruptImageError

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")
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
    assert there[2].weights.tolist() == [0]


def test_a_damaged_file_stops_with_its_name(split: FileSplit) -> None:
    with pytest.raises(CorruptImageError, match=r"short\.jpg cannot be decoded"):
        _read(split, on_device=True)


Decode = Callable[[list[torch.Tensor]], list[torch.Tensor]]


@pytest.fixture
def decode_with(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Decode], Decode]], None]:
    """Lets a function of the usual decoder make that of the device."""

    def use(change: Callable[[Decode], Decode]) -> None:
        monkeypatch.setattr(device_decode, "batch_decoder", lambda *arguments: change(batch_decoder(*arguments)))

    return use


def test_images_the_device_refuses_are_decoded_by_the_cpu(
    split: FileSplit, decode_with: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(files: list[torch.Tensor], decode: Decode) -> list[torch.Tensor]:
        if any(file.numel() == split.paths[0].stat().st_size for file in files):
            raise RuntimeError("nvJPEG: unsupported")
        return decode(files)

    decode_with(lambda decode: partial(refuse, decode=decode))
    there, here = (_read(split, on_device, skip_corrupt=True) for on_device in (True, False))
    for ours, theirs in zip(there, here, strict=True):
        assert (ours.images - theirs.images).abs().mean() < 0.5
    assert torch.equal(there[0].images[0], here[0].images[0])
    assert [record.message for record in caplog.records if "the GPU cannot decode" in record.message] == [
        "--decode gpu: the GPU cannot decode an image (nvJPEG: unsupported); the CPU decodes such images"
    ]


def test_a_device_that_decodes_nothing_is_refused_at_once(split: FileSplit, decode_with: Callable[..., None]) -> None:
    def lacking(files: list[torch.Tensor]) -> list[torch.Tensor]:
        raise RuntimeError("not compiled with nvJPEG support")

    decode_with(lambda decode: lacking)
    with pytest.raises(ConfigError, match=r"not compiled with nvJPEG.*omit --decode gpu"):
        _read(split, on_device=True)


def test_only_plain_files_are_left_to_the_device(split: FileSplit, decode_with: Callable[..., None]) -> None:
    counts: list[int] = []
    decode_with(lambda decode: lambda files: counts.append(len(files)) or decode(files))  # type: ignore[func-returns-value]
    _read(split, on_device=True, skip_corrupt=True)
    assert counts == [1, *[2, 2] * 3]  # the first is a trial; not the PNG, the CMYK and the damaged one


class Factors(TorchFunctionMode):
    """Notes by how much each call of F.interpolate shrinks."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[float] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function is F.interpolate:
            self.found.append(max(old / new for old, new in zip(args[0].shape[2:], result.shape[2:], strict=True)))
        return result


@pytest.mark.parametrize("size", [(4000, 3000), (40, 6000), (100, 120)])
def test_no_kernel_shrinks_by_more_than_cuda_can(size: tuple[int, int]) -> None:
    ramp = torch.linspace(0, 255, size[1]).expand(1, 3, *size)
    with Factors() as factors:
        resized = device_decode.resize(ramp, 32, 32)
    assert resized.shape == (1, 3, 32, 32)
    assert factors.found[0] < 92
    expected = F.interpolate(ramp, (32, 32), mode="bilinear", antialias=True)
    torch.testing.assert_close(resized, expected, rtol=0, atol=1.5)
