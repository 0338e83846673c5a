"""Elastic scripts: state among real workers, commits that come back, and a job that loses a worker."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from commands import LOCKSTEP, own_environment
from commands import run as run_command
from torch.distributed import distributed_c10d
from worker_group import on_workers, run_in_workers

import lockstep.hvd as hvd
from lockstep.hvd.elastic import ElasticSampler, TorchState, run
from lockstep.hvd.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from lockstep.world import NODE_PROCESS
from lockstep.world.generations import ADDED, REMOVED
from lockstep.world.launcher_environment import RankInfo
from lockstep.world.world import World


def bits(state: Any) -> Any:
    """A state whose tensors are bytes, for comparison."""
    if isinstance(state, torch.Tensor):
        return f"{state.dtype}", tuple(state.shape), state.numpy().tobytes()
    if isinstance(state, dict):
        return {key: bits(value) for key, value in state.items()}
    return [bits(value) for value in state] if isinstance(state, (list, tuple)) else state


def contents(state: TorchState) -> Any:
    handled = [state.model, state.optimizer, state.sampler, state.scheduler]
    return bits([*(value.state_dict() for value in handled), state.note])


def _sync(world: World, advanced: int) -> tuple[Any, Any, Any]:
    """Before the sync, after it, and after more training and a restore; rank `advanced` alone has trained before."""
    hvd.init()
    torch.manual_seed(world.rank)
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 + world.rank)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    sampler = ElasticSampler(range(20))

    def train() -> None:
        optimizer.zero_grad()
        model(torch.randn(4, 3)).square().sum().backward()
        optimizer.step()
        scheduler.step()
        sampler.record_batch(0, 3)

    if world.rank == advanced:
        train()
    state = TorchState(model, optimizer, sampler=sampler, scheduler=scheduler, note={"rank": world.rank})
    before = contents(state)
    state.sync()
    after = contents(state)
    train()
    state.note["rank"] = "changed"
    state.restore()
    restored = contents(state)
    hvd.shutdown()
    return before, after, restored


@pytest.mark.parametrize("advanced", [0, 1])
def test_all_workers_take_over_rank_0s_state_and_come_back_to_it(advanced: int) -> None:
    (before, *first), (other, *second) = run_in_workers(2, _sync, advanced)
    assert before != other
    assert first == second == [before, before]


def _training(world: World, failing_at: int | None) -> tuple[Any, list[list[int]]]:
    """Train with commits; in one step the workers disagree on a tensor, as if a worker had been lost in it."""
    hvd.init()
    torch.manual_seed(0)
    data = torch.randn(24, 3)
    model = torch.nn.Linear(3, 1)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), named_parameters=model.named_parameters()
    )
    sampler = ElasticSampler(data)
    batches: list[list[int]] = []

    @run
    def train(state: TorchState) -> None:
        nonlocal failing_at
        for step, batch in enumerate(torch.utils.data.BatchSampler(sampler, 2, drop_last=False)):
            model(data[batch]).square().mean().backward()
            if state.step == failing_at:
                failing_at = None
                hvd.allreduce(torch.zeros(1 + world.rank), name="disagreement")
            optimizer.step()
            optimizer.zero_grad()
            batches.append(batch)
            sampler.record_batch(step, len(batch))
            state.step += 1
            if state.step % 2 == 0:
                state.commit()

    train(TorchState(model, optimizer, sampler=sampler, step=0))
    hvd.shutdown()
    return bits([model.state_dict(), optimizer.state_dict()]), batches


def test_training_that_failed_matches_the_undisturbed_one() -> None:
    undisturbed = run_in_workers(2, _training, None)
    assert sorted(index for _, batches in undisturbed for batch in batches for index in batch) == list(range(24))
    disturbed = run_in_workers(2, _training, 3)
    assert [weights for weights, _ in disturbed] == [weights for weights, _ in undisturbed]
    for (_, batches), (_, expected) in zip(disturbed, undisturbed, strict=True):
        assert batches == expected[:3] + expected[2:]  # batch 2 came after the last commit: once more


@on_workers(2)
def test_rank_0s_knowledge_of_the_hosts_interrupts_all_workers(world: World) -> None:
    """Hosts are removed, and rank 0 alone knows it; the workers go on without a sync."""
    hvd.init()

    def host_changes(since: int) -> tuple[int, int]:
        assert world.rank == 0
        return 4, REMOVED if since < 4 else 0

    state, outcome = TorchState(note=world.rank), []

    @run
    def train(state: TorchState) -> None:
        try:
            state.commit()
        except HostsUpdatedInterrupt as interrupt:
            outcome.append(interrupt.skip_sync)
            state.note = 10 + world.rank
            raise

    with patch("lockstep.world.generations.host_changes", host_changes):
        train(state)
    hvd.shutdown()
    assert outcome == [True]
    assert state.note == 10 + world.rank


@on_workers(2)
def test_one_worker_that_needs_the_state_is_given_it_by_all(world: World) -> None:
    """Rank 0 was interrupted for removed hosts and needs no sync; rank 1 failed, as a new worker would have started."""
    hvd.init()
    errors: list[BaseException] = [HorovodInternalError() if world.rank else HostsUpdatedInterrupt(skip_sync=True)]

    @run
    def train(state: TorchState) -> int:
        if errors:
            state.note = 5 + world.rank
            raise errors.pop()
        return state.note

    assert train(TorchState(note=world.rank)) == 5
    hvd.shutdown()


WORKERS = (3, 2, 3)  # of each generation: one is lost, and another comes
SAMPLES = 36


class Launcher:
    """Stands for the launcher of an elastic job: generation by generation, some of the workers meet."""

    def __init__(self, world: World, generations: list[int]) -> None:
        self.world = world
        self.number, *self.later = generations
        self.change = (0, 0)

    def meet(self, comm: Any, settings: Any) -> tuple[RankInfo, Any, int]:
        size, rank = WORKERS[self.number], self.world.rank
        store = dist.PrefixStore(f"generation-{self.number}", distributed_c10d._get_default_store())
        return RankInfo(rank, size, rank, size), store, size

    def join_next(self, meanwhile: Any = ()) -> None:
        self.number, *self.later = self.later

    def host_changes(self, since: int) -> tuple[int, int]:
        number, kinds = self.change
        return number, kinds if since < number else 0


def _life(world: World, generations: list[int], lost_at: int | None, news_at: int | None) -> tuple[Any, list[Any]]:
    """One worker's life: it is there in some generations, and may be lost before a step or hear of news before one."""
    launcher = Launcher(world, generations)
    with (
        patch.dict(os.environ, {NODE_PROCESS: "none"}),
        patch("lockstep.hvd.basics._meet", launcher.meet),
        patch.multiple(
            "lockstep.world.generations",
            stay=lambda **named: None,
            join_next=launcher.join_next,
            host_changes=launcher.host_changes,
        ),
    ):
        hvd.init()
        torch.manual_seed(world.rank + 10 * generations[0])
        data = torch.randn(SAMPLES, 3, generator=torch.Generator().manual_seed(0))
        model = torch.nn.Linear(3, 1)
        optimizer = torch.optim.Adam(model.parameters())
        sampler = ElasticSampler(data)
        sizes, taken = [], []

        @run
        def train(state: TorchState) -> None:
            sizes.append((hvd.size(), state.step, len(sampler)))
            for step, batch in enumerate(torch.utils.data.BatchSampler(sampler, 2, drop_last=False)):
                if state.step == lost_at:
                    return
                if state.step == news_at:
                    launcher.change = 1, ADDED
                optimizer.zero_grad()
                model(data[batch]).square().mean().backward()
                for name, parameter in model.named_parameters():
                    parameter.grad = hvd.allreduce(parameter.grad, name=name)
                optimizer.step()
                sampler.record_batch(step, len(batch))
                state.step += 1
                taken.append(batch)
                state.commit()

        train(TorchState(model, optimizer, sampler=sampler, step=0))
        hvd.shutdown()
    return bits([model.state_dict(), optimizer.state_dict()]), [sizes, taken]


def _lives(world: World) -> list[tuple[Any, list[Any]]]:
    if world.rank < 2:
        return [_life(world, [0, 1, 2], lost_at=None, news_at=4)]
    return [_life(world, [0], lost_at=2, news_at=None), _life(world, [2], lost_at=None, news_at=None)]


def test_epoch_continues_when_a_worker_dies_and_when_one_joins() -> None:
    (first,), (second,), (lost, new) = run_in_workers(3, _lives)
    # 36 samples: 2 steps of 3 x 2 leave 24 for 2 workers; 3 steps of 2 x 2 leave 12 for 3 workers.
    assert first[1][0] == second[1][0] == [(3, 0, 12), (2, 2, 12), (3, 5, 4)]
    assert (lost[1][0], new[1][0]) == ([(3, 0, 12)], [(3, 5, 4)])
    assert first[0] == second[0] == new[0]
    taken = [index for life in (first, second, lost, new) for batch in life[1][1] for index in batch]
    assert sorted(taken) == list(range(SAMPLES))


# Steps of SGD by hand: an optimizer would cost each worker seconds of imports.
SCRIPT = """
import os, signal, sys
from pathlib import Path
import torch
import horovod.torch as hvd

folder, first = Path(sys.argv[1]), os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
hvd.init()
torch.manual_seed(hvd.rank())  # rank 0's weights count
model = torch.nn.Linear(4, 1).double()
torch.nn.init.constant_(model.weight, hvd.rank() + 1.0)
samples = torch.randn(64, 4, dtype=torch.double, generator=torch.Generator().manual_seed(1))

@hvd.elastic.run
def train(state):
    while state.step < 10:
        indices = state.sampler.remaining_indices[: 2 * hvd.size()][hvd.rank() :: hvd.size()]
        (slope,) = torch.autograd.grad(model(samples[indices]).square().mean(), model.weight)
        with torch.no_grad():
            model.weight -= 0.1 * hvd.allreduce(slope)
        state.sampler.record_batch(state.step, 2)
        state.sampler.reset()
        state.step += 1
        tell("steps", state.step)
        state.commit()
        if first and state.step == 4 and hvd.rank() == 0:
            os.kill(os.getpid(), signal.SIGKILL)

def tell(name, *words):
    if hvd.rank() == 0:
        with (folder / name).open("a") as file:
            print(*words, file=file)

sampler = hvd.elastic.ElasticSampler(samples, seed=3)
model.bias.data.zero_().requires_grad_(False)
state = hvd.elastic.TorchState(model=model, sampler=sampler, step=0)
state.register_reset_callbacks([lambda: tell("resets", state.step, hvd.size())])
train(state)
if hvd.rank() == 0:
    torch.save({"weight": model.weight.detach(), "done": sampler.processed_num}, folder / "result.pt")
"""


def undisturbed() -> torch.Tensor:
    """The weights that the script must find, by one process that knows nothing of elastic training."""
    samples = torch.randn(64, 4, dtype=torch.double, generator=torch.Generator().manual_seed(1))
    order = list(range(64))
    random.Random(3).shuffle(order)
    weight = torch.ones(1, 4, dtype=torch.double)
    for step in range(10):
        batch = samples[order[4 * step : 4 * step + 4]]
        weight -= 0.1 * 2 * (batch @ weight.T * batch).mean(0, keepdim=True)
    return weight


def test_other_worker_continues_from_its_last_commit(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    script = [sys.executable, tmp_path / "script.py", tmp_path]
    flags = ("-np", "2", "--max-restarts", "1")
    job = run_command([*LOCKSTEP, "run", *flags, "--", *script], tmp_path, own_environment(OMP_NUM_THREADS="1"))
    assert job.returncode == 0, job.stderr
    assert "restart 1 of 1, with 2 workers, of which 1 stays" in job.stderr
    result = torch.load(tmp_path / "result.pt")
    torch.testing.assert_close(result["weight"], undisturbed(), rtol=0, atol=1e-12)
    assert result["done"] == 40
    assert (tmp_path / "steps").read_text().split() == [str(step) for step in range(1, 11)]  # none twice
    assert (tmp_path / "resets").read_text() == "4 2\n"
