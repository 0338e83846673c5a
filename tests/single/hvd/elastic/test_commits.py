"""The last commit of a worker that must exit is restored in another process, or refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.errors import CheckpointError
from lockstep.hvd.elastic import ElasticSampler, TorchState, commits, run_fn
from lockstep.hvd.elastic.commits import StateCopy
from lockstep.hvd.elastic.state import ObjectState
from lockstep.world import COMMIT, SNAPSHOTS

pytestmark = pytest.mark.usefixtures("one_worker")
WORK = "train (call 1)"


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(SNAPSHOTS, str(tmp_path))
    return tmp_path / COMMIT


def _state(steps: int) -> TorchState:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    sampler = ElasticSampler(range(10))
    sampler.record_batch(0, steps)
    return TorchState(model, optimizer, sampler=sampler, step=steps, scale=lambda value: steps * value)


def _figures(state: TorchState) -> list[Any]:
    tensors = [*state.model.state_dict().values(), *state.optimizer.state_dict()["state"][0].values()]
    return [*(each.tolist() for each in tensors), state.sampler.processed_num, state.step, state.scale(2)]


def test_another_process_restores_the_last_commit_alone() -> None:
    state = _state(3)
    committed = _figures(state)
    state.model.weight.data.zero_()
    state.step = 7
    commits.keep(state, WORK)
    other = _state(0)
    assert commits.take(other, WORK)
    assert _figures(other) == committed
    other.step = 9
    other.restore()
    assert other.step == 3


def test_training_begins_with_the_commit_and_removes_it(file: Path) -> None:
    resets: list[int] = []

    def train(state: TorchState) -> int:
        assert not file.exists()
        return int(state.step)

    state, function = _state(0), run_fn(train, lambda: None)
    commits.keep(_state(3), "other work")
    with pytest.raises(CheckpointError) as caught:
        function(state)
    earlier = str(caught.value).partition("started again with ")[2]
    number = int(earlier.rpartition(" ")[2].removesuffix(")"))
    commits.keep(_state(3), earlier.replace(f"call {number}", f"call {number + 1}"))
    state.register_reset_callbacks([lambda: resets.append(state.step)])
    assert function(state) == 3
    assert resets == [3]


def test_commit_of_other_work_is_an_error(file: Path) -> None:
    commits.keep(_state(3), "train (call 2)")
    state = _state(0)
    with pytest.raises(CheckpointError, match="but the script has started again with train"):
        commits.take(state, WORK)
    assert state.step == 0
    assert not file.exists()


def test_sparse_tensors_are_copied_on_their_device(accelerators: Callable[..., None]) -> None:
    """As before commits were in host memory: a graph network may have such a buffer."""
    accelerators(current=torch.device("meta"))  # stands for a GPU
    adjacency = torch.sparse_coo_tensor(size=(3, 3), device="meta", check_invariants=False)
    restored = StateCopy({"adjacency": adjacency}).restored()["adjacency"]
    assert restored is not adjacency
    assert (restored.layout, restored.device.type) == (torch.sparse_coo, "meta")


class Larger(ObjectState):
    def save(self) -> None:
        super().save()
        self.more = 1


def test_what_cannot_be_kept_whole_is_not_kept(file: Path, capfd: pytest.CaptureFixture[str]) -> None:
    half = _state(3)
    half._handlers["model"]._saved = None  # its device has failed while it was copied
    for state in (Larger(lambda value: value, lambda: 0, step=1), half):
        commits.keep(state, WORK)
    commits.keep(ObjectState(lambda value: value, lambda: 0, value=_Unpicklable()), WORK)
    assert not file.exists()
    assert "the last commit cannot be kept in" in capfd.readouterr().err
    assert not commits.take(_state(0), WORK)


class _Unpicklable:
    def __reduce__(self) -> str:
        raise TypeError("no pickle")

    def __deepcopy__(self, memo: object) -> _Unpicklable:
        return self


def test_only_rank_0_restores_it(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commits.keep(_state(3), WORK)
    monkeypatch.setattr(commits, "rank", lambda: 1)
    assert not commits.take(_state(0), WORK)
    assert file.exists()
