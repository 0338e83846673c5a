"""Files of weights beside other objects and attacks: weights are read, nothing is imported or called."""

from __future__ import annotations

import argparse
import collections
import datetime
import enum
import functools
import importlib
import os
import pathlib
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from attack import Attack
from safetensors.torch import save_file
from torch import nn

from lockstep.errors import CheckpointError
from lockstep.models import pretrained, saved_weights
from lockstep.models.saved_weights import MAX_CLASSES


def test_tensors_of_safetensors_have_their_own_aligned_memory(tmp_path: Path) -> None:
    save_file({"odd": torch.ones(3, dtype=torch.uint8), "even": torch.ones(4)}, tmp_path / "x.safetensors")
    tensors = saved_weights.read_safetensors(tmp_path / "x.safetensors")
    (tmp_path / "x.safetensors").write_bytes(b"")  # a view of the file would end the process
    assert [tensor.data_ptr() % 16 for tensor in tensors.values()] == [0, 0]
    assert tensors["even"].tolist() == [1.0] * 4


class Color(enum.Enum):
    RED = 1


class Weights(collections.OrderedDict[str, Any]):
    """Like the dicts that give their items as attributes."""


class Items(list[Any]):
    pass


class Point(NamedTuple):
    x: int


@dataclass
class Config:
    lr: float = 0.1
    inner: dict[str, Path] = field(default_factory=lambda: {"out": Path("out")})

    class Inner:
        depth = 2


@dataclass(frozen=True, slots=True)
class Frozen:
    lr: float = 0.1


def _inner() -> Config.Inner:
    inner = Config.Inner()
    inner.depth = 3
    return inner


def _net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))


BESIDE: dict[str, Any] = {
    "Namespace": argparse.Namespace(lr=0.1, out=Path("out"), color=Color.RED, when=datetime.timedelta(1)),
    "enum": Color.RED,
    "path": pathlib.PurePosixPath("a/b"),
    "dataclass": Config(),
    "frozen dataclass": Frozen(),
    "nested class": _inner(),
    "named tuple": Point(1),
    "dict with attributes": Weights(a=Items([1, 2])),
    "default dict": collections.defaultdict(list, a=[1]),
    "deque": collections.deque([1.5], maxlen=3),
    "frozenset": frozenset({1}),
    "partial": functools.partial(int, base=2),
    "class": Config,
    "scheduler": torch.optim.lr_scheduler.StepLR(torch.optim.SGD(_net().parameters(), lr=0.1), 30),
    "NumPy": {"state": np.random.RandomState(0).get_state(), "rows": np.ones((2, 3))},
    "one in two places": [config := Config(), config],
}


def _check_tensors(path: Path, expected: dict[str, torch.Tensor]) -> None:
    found = pretrained.read_tensors(path)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("name", [*BESIDE, "all"])
def test_weights_are_read_beside_other_objects(tmp_path: Path, name: str, zipped: bool) -> None:
    weights, path = _net().state_dict(), tmp_path / "model.pth"
    beside = BESIDE if name == "all" else {name: BESIDE[name]}
    torch.save({**beside, "state_dict": weights, "args": beside}, path, _use_new_zipfile_serialization=zipped)
    _check_tensors(path, weights)


def test_weights_may_be_in_a_subclass_of_dict(tmp_path: Path) -> None:
    weights = Weights(_net().state_dict())
    weights._metadata = _net().state_dict()._metadata  # type: ignore[attr-defined]
    for content in (weights, {"model": weights}, Weights(model=weights, args=Config())):
        torch.save(content, tmp_path / "model.pth")
        _check_tensors(tmp_path / "model.pth", weights)
        assert pretrained.read_tensors(tmp_path / "model.pth")._metadata == weights._metadata  # type: ignore[attr-defined]


def test_no_module_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    module, path, weights = tmp_path / "of_a_script.py", tmp_path / "model.pth", _net().state_dict()
    module.write_text("class Config:\n    pass")
    torch.save({"model": weights, "args": importlib.import_module(module.stem).Config()}, path)
    del sys.modules[module.stem]
    module.write_text("raise SystemExit('imported')")
    _check_tensors(path, weights)
    assert module.stem not in sys.modules


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize(
    ("function", "is_read"),
    [
        (os.system, False),
        (os.unlink, False),
        (eval, False),
        (exec, False),
        (open, True),
        (getattr, False),
        (subprocess.call, True),
        (pathlib.Path.touch, True),
        (shutil.rmtree, True),
        (pickle.loads, True),
        (type, True),
    ],
)
@pytest.mark.parametrize("place", ["beside", "in args", "as key"])
def test_no_function_is_called(
    tmp_path: Path, function: Callable[..., Any], is_read: bool, place: str, zipped: bool
) -> None:
    """Some attacks are refused; of the others, only the weights are read."""
    victim, path, weights = tmp_path / "victim", tmp_path / "model.pth", _net().state_dict()
    victim.mkdir()
    arguments: dict[Any, tuple[Any, ...]] = {
        os.system: (f"rmdir {victim}",),
        subprocess.call: (["rmdir", str(victim)],),
        getattr: ("", "upper"),
        eval: (code := f"__import__('os').rmdir({str(victim)!r})",),
        exec: (code,),
        type: ("X", (), {}),
        open: (str(tmp_path / "new"), "w"),
        pathlib.Path.touch: (str(tmp_path / "new"),),
        pickle.loads: (pickle.dumps(Attack(os.rmdir, str(victim))),),
    }
    attack = Attack(function, *arguments.get(function, (str(victim),)))
    beside = {"beside": {"x": attack}, "in args": {"args": argparse.Namespace(x=attack)}, "as key": {attack: 1}}
    torch.save({"model": weights, **beside[place]}, path, _use_new_zipfile_serialization=zipped)
    if is_read:
        _check_tensors(path, weights)
    else:
        with pytest.raises(CheckpointError, match="not loaded, and no code in it was run: it references "):
            saved_weights.read(path)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["model.pth", "victim"]


def test_objects_in_place_of_weights_are_named(tmp_path: Path) -> None:
    path, advice = tmp_path / "model.pth", r".*instead of weights; .*save its state_dict\(\)"
    for content in (_net(), {"model": _net(), "epoch": 1}):
        torch.save(content, path)
        with pytest.raises(CheckpointError, match=r"contains a torch\.nn\.modules\.container\.Sequential" + advice):
            saved_weights.read(path)
    torch.save({"model": Config(), "state_dict": (weights := _net().state_dict())}, path)
    _check_tensors(path, weights)
    torch.save({"model": {"0.weight": Config()}}, path)
    with pytest.raises(CheckpointError, match=r"not tensors: 0\.weight"):
        pretrained.read_tensors(path)


def test_a_file_may_name_only_so_many_classes(tmp_path: Path) -> None:
    path, weights = tmp_path / "model.pth", _net().state_dict()
    for count in (MAX_CLASSES, MAX_CLASSES + 1):
        kinds = [type(f"Kind{number}", (), {"__module__": __name__}) for number in range(count)]
        globals().update({kind.__name__: kind for kind in kinds})
        torch.save({"model": weights, "args": [kind() for kind in kinds]}, path)
        if count == MAX_CLASSES:
            _check_tensors(path, weights)
    with pytest.raises(CheckpointError, match=rf"it references .*\.Kind{MAX_CLASSES}"):
        saved_weights.read(path)
