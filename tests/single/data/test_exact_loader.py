"""Loaders over any data set: shares, seeds, positions, and what they refuse."""

from __future__ import annotations

import multiprocessing
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
    get_worker_info,
)

from lockstep.data.exact_loader import ExactLoader
from lockstep.data.seeded_samples import Request, SeededSet
from lockstep.errors import ConfigError, DataError
from lockstep.run.connect import TrainingWorld
from lockstep.world.launcher_environment import RankInfo

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


class Noisy(Dataset[Any]):
    """Samples that are random in all three ways: (number, three draws)."""

    def __init__(self, count: int = 23):
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, torch.tensor([float(torch.rand(())), random.random(), np.random.rand()], dtype=torch.float64)


def _world(rank: int = 0, size: int = 1) -> TrainingWorld:
    return TrainingWorld(RankInfo(rank=rank, size=size), torch.device("cpu"))


def _read(size: int, epoch: int = 0, start: int = 0, data: Any = None, **options: Any) -> list[dict[int, list[float]]]:
    """The samples of each step over all workers, by number."""
    steps: dict[int, dict[int, list[float]]] = {}
    for rank in range(size):
        world = _world(rank, size)
        object.__setattr__(world, "gather", lambda value: [value])  # the others read later
        loader = world.loader(data or Noisy(), **options)
        loader.begin(epoch, start)
        for numbers, draws in loader:
            step = steps.setdefault(loader.steps_done - loader.completes_step, {})
            if loader.samples:
                assert not step.keys() & set(numbers.tolist())
                step.update(zip(numbers.tolist(), draws.tolist(), strict=True))
    return [step for _, step in sorted(steps.items())]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("processes", [0, 2])
def test_steps_have_the_same_samples_with_any_number_of_workers(size: int, processes: int) -> None:
    alone = _read(1, epoch=3, global_batch=6, shuffle=True)
    assert sorted(number for step in alone for number in step) == list(range(23))
    assert _read(size, epoch=3, global_batch=6, shuffle=True, num_workers=processes) == alone
    assert _read(size, epoch=3, start=2, global_batch=6, shuffle=True, num_workers=processes) == alone[2:]
    assert _read(size, epoch=3, global_batch=6, shuffle=True, drop_last=True) == alone[:-1]


class RarelyNoisy(Noisy):
    """Samples that draw numbers only from some place on, by one of the global generators."""

    def __init__(self, name: str, first: int):
        super().__init__()
        self.name, self.first, self.reads = name, first, 0

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        self.reads += 1
        draws = {"random": random.random, "gauss": lambda: random.gauss(0, 1), "numpy": np.random.randn}
        draw = (draws | {"then a seed": lambda: (random.random(), random.seed(0))[0]}).get(self.name)
        number = draw() if draw else torch.initial_seed() % 1_000_003
        return index, torch.tensor([float(number) if index >= self.first else 0.0], dtype=torch.float64)


@pytest.mark.parametrize("name", ["random", "gauss", "numpy", "then a seed", "initial seed"])
@pytest.mark.parametrize("first", [0, 9])
def test_samples_that_seldom_draw_are_seeded_as_others(name: str, first: int) -> None:
    alone = _read(1, epoch=1, data=RarelyNoisy(name, first), global_batch=6)
    draws = [row[0] for step in alone for number, row in step.items() if number >= first]
    assert len(set(draws)) == 23 - first
    for size, start, processes in ((1, 2, 0), (2, 2, 2), (3, 0, 0)):
        data = RarelyNoisy(name, first)
        assert _read(size, epoch=1, start=start, data=data, global_batch=6, num_workers=processes) == alone[start:]


class NoisyTensors(TensorDataset):
    def __getitem__(self, index: int) -> Any:
        return (super().__getitem__(index)[0] + torch.rand(()),)


@pytest.mark.parametrize(("kind", "draws"), [(TensorDataset, [0.0, 0.0]), (NoisyTensors, None)])
@pytest.mark.parametrize("is_subset", [False, True])
def test_only_samples_that_can_draw_are_seeded(kind: Any, draws: list[float] | None, is_subset: bool) -> None:
    data = kind(torch.arange(6.0))
    torch.manual_seed(5)
    samples = SeededSet(Subset(data, range(5)) if is_subset else data, default_collate, None)
    _, (batch,) = samples.__getitems__(Request(0, 1, [4, 2], [7, 8], 9, 2))
    assert (torch.initial_seed() == 5) == (draws is not None)
    draws = draws or [float(torch.rand((), generator=torch.Generator().manual_seed(seed))) for seed in (7, 8)]
    assert batch.tolist() == pytest.approx([4 + draws[0], 2 + draws[1]])


_images = torch.rand(6, 1, 3, 4).to(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    "tensors",
    [
        (torch.rand(6, 2, 3), torch.arange(6)),
        *((torch.ones(6, 2).to(dtype),) for dtype in (torch.bool, torch.uint16, torch.bfloat16, torch.complex64)),
        *((torch.ones(6).to(dtype),) for dtype in (torch.float8_e4m3fn, torch.uint64)),
        (_images, torch.rand(3, 6).t(), torch.rand(6, 0)),
        (torch.rand(6, 2, requires_grad=True),),
        (torch.nn.Parameter(torch.rand(6, 2)), torch.rand(6)),
    ],
)
@pytest.mark.parametrize("indices", [None, [5, 0, 0, 3], [-1, 2, 0, 1], np.array([1, 4, 2, 3])])
def test_batch_of_tensors_is_that_of_default_collate(tensors: Any, indices: Any) -> None:
    data: Any = TensorDataset(*tensors)
    data = data if indices is None else Subset(data, indices)
    _, batch = SeededSet(data, default_collate, None).__getitems__(Request(0, 1, [3, 1, 1], [7, 8, 9], 9, 0))
    expected = default_collate([data[sample] for sample in (3, 1, 1)])
    assert type(batch) is type(expected)
    for own, other in zip(batch, expected, strict=True):
        assert (own.dtype, own.shape, own.stride()) == (other.dtype, other.shape, other.stride())
        assert own.requires_grad == other.requires_grad
        assert (
            own.detach().reshape(-1).view(torch.uint8).tolist() == other.detach().reshape(-1).view(torch.uint8).tolist()
        )


@pytest.mark.parametrize("indices", [[0, 1, 6], [0, 1, -7]])
def test_missing_sample_of_tensors_is_an_error(indices: list[int]) -> None:
    samples = SeededSet(Subset(TensorDataset(torch.rand(6)), indices), default_collate, None)
    with pytest.raises(IndexError):
        samples.__getitems__(Request(0, 1, [0, 1, 2], [7, 8, 9], 9, 0))


def test_epochs_and_seeds_differ() -> None:
    orders = [
        [number for step in _read(1, epoch, global_batch=6, shuffle=shuffle, seed=seed) for number in step]
        for epoch, seed, shuffle in [(0, 0, True), (1, 0, True), (0, 1, True), (0, 0, False)]
    ]
    assert len(set(map(tuple, orders))) == 4
    assert orders[3] == list(range(23))


def _order_and_draws(loader: ExactLoader) -> list[Any]:
    return [(numbers.tolist(), draws.tolist()) for numbers, draws in loader]


@pytest.mark.parametrize("data", ["Noisy", "NoisyStream"])
def test_loaders_of_one_seed_differ(data: str) -> None:
    def read() -> list[list[Any]]:
        world = _world()
        make = Noisy if data == "Noisy" else NoisyStream
        return [_order_and_draws(world.loader(make(), 6, shuffle=data == "Noisy")) for _ in range(3)]

    first, second, third = read()
    assert read() == [first, second, third]
    assert first == _order_and_draws(_world().loader(Noisy(), 6, shuffle=True)) or data != "Noisy"
    draws = [{tuple(row) for _, rows in each for row in rows} for each in (first, second, third)]
    assert len(set.union(*draws)) == 3 * 23
    assert len({tuple(number for numbers, _ in each for number in numbers) for each in (first, second, third)}) == 3


def test_each_pass_is_the_next_epoch() -> None:
    loader = _world().loader(Noisy(), 6, shuffle=True)
    passes = [[numbers.tolist() for numbers, _ in loader] for _ in range(2)]
    assert passes[0] != passes[1]
    loader.begin(1)
    assert [numbers.tolist() for numbers, _ in loader] == passes[1]
    assert len(loader) == 4


@pytest.mark.parametrize(("size", "accumulate"), [(1, 3), (2, 1), (2, 2), (3, 2)])
def test_weights_make_the_mean_over_the_global_batch(size: int, accumulate: int) -> None:
    loaders = [_world(rank, size).loader(Noisy(), global_batch=10, accumulate=accumulate) for rank in range(size)]
    sums, counts = [0.0] * 3, [0] * 3
    for loader in loaders:
        for numbers, _ in loader:
            step = loader.steps_done - loader.completes_step
            sums[step] += float(numbers.double().mean()) * loader.weight / size
            counts[step] += loader.samples
    assert counts == [10, 10, 3]
    assert sums == pytest.approx([4.5, 14.5, 21.0])


def test_workers_without_samples_take_part_with_weight_0() -> None:
    weights = []
    for rank in range(4):
        loader = _world(rank, 4).loader(Noisy(3), global_batch=8)
        batches = [(len(numbers), loader.samples, loader.weight) for numbers, _ in loader]
        assert len(batches) == 1
        weights.append(batches[0])
    assert sorted(weights) == [(1, 0, 0.0), (1, 1, 4 / 3), (1, 1, 4 / 3), (1, 1, 4 / 3)]


@pytest.mark.parametrize(("samples", "size", "batch"), [(23, 2, 4), (23, 3, 4), (9, 2, 2), (8, 4, 64)])
def test_evaluations_have_each_sample_once_in_even_batches(samples: int, size: int, batch: int) -> None:
    loaders = [_world(rank, size).loader(Noisy(samples), batch, evaluate=True) for rank in range(size)]
    parts = [[numbers.tolist() for numbers, _ in loader] for loader in loaders]
    assert sorted(number for worker in parts for numbers in worker for number in numbers) == list(range(samples))
    assert len({len(worker) for worker in parts}) == 1
    assert max(len(numbers) for worker in parts for numbers in worker) <= batch


def test_generators_of_the_loop_are_left_alone() -> None:
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    for _ in _world().loader(Noisy(), 4):
        pass
    drawn = float(torch.rand(())), random.random(), float(np.random.rand())
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    assert drawn == (float(torch.rand(())), random.random(), float(np.random.rand()))


@pytest.mark.parametrize("processes", [0, 1])
def test_a_data_set_with_a_generator_of_its_own_is_named_once(
    processes: int, capfd: pytest.CaptureFixture[str]
) -> None:
    class Own(Noisy):
        generator = np.random.default_rng()

        def __getitem__(self, index: int) -> Any:
            return {"x": [self.generator.random(3)], "name": "a"}

    loader = _world().loader(Own(), 4, num_workers=processes)
    for _ in range(2):
        assert len(list(loader)) == 6
    assert capfd.readouterr().err.count("Own is random in a way that the loader cannot repeat") == 1


@pytest.mark.parametrize("data", [Noisy(8), TensorDataset(torch.ones(8))])
@pytest.mark.parametrize(("draw", "count"), [(np.random.default_rng().random, 1), (np.random.rand, 0)])
def test_a_generator_of_the_collate_function_is_named(
    data: Any, draw: Callable[[], float], count: int, capfd: pytest.CaptureFixture[str]
) -> None:
    list(_world().loader(data, 4, collate_fn=lambda items: draw()))
    assert capfd.readouterr().err.count("is random in a way that the loader cannot repeat") == count


@pytest.mark.parametrize("name", ["dataset", "collate_fn"])
def test_attributes_that_are_set_too_late_are_refused(name: str) -> None:
    loader = _world().loader(Noisy(), 4)
    loader.own = 1  # type: ignore[attr-defined]
    next(iter(loader))
    setattr(loader, name, None)
    with pytest.raises(ConfigError, match=f"{name}: set too late"):
        next(iter(loader))


def test_a_pass_that_never_began_ends_no_other() -> None:
    loader = _world().loader(TensorDataset(torch.arange(8)), 4)
    unused, batches = iter(loader), iter(loader)
    next(batches)
    del unused
    assert loader.state_dict()["epoch"] == 0


def test_a_number_from_a_generators_state_is_noticed(capfd: pytest.CaptureFixture[str]) -> None:
    class Deriving(Noisy):
        def __getitem__(self, index: int) -> Any:
            return torch.ones(1) * int(np.random.get_state()[1][0])  # type: ignore[index]

    list(_world().loader(Deriving(), 4))
    assert "Deriving is random in a way that the loader cannot repeat" in capfd.readouterr().err


@pytest.mark.parametrize(("samples", "batch"), [(8, 4), (40, 1), (400, 16)])
def test_a_rare_draw_of_an_own_generator_is_noticed(
    samples: int, batch: int, capfd: pytest.CaptureFixture[str]
) -> None:
    class Own(Noisy):
        reads, generator = 0, np.random.default_rng()

        def __getitem__(self, index: int) -> Any:
            self.reads += 1
            return torch.ones(1) * (self.generator.random() if self.generator.random() < 0.1 else 1.0)

    for seed in range(30):
        data = Own(samples)
        data.generator = np.random.default_rng(seed)
        list(_world().loader(data, batch))
        assert data.reads <= samples + 64
    assert capfd.readouterr().err.count("Own is random in a way that the loader cannot repeat") == 30


def test_own_generators_can_be_seeded(capfd: pytest.CaptureFixture[str]) -> None:
    class Own(Noisy):
        generator = torch.Generator()

        def __getitem__(self, index: int) -> Any:
            return index, torch.rand(3, generator=self.generator)

    data = Own()
    runs = [
        _read(size, data=data, global_batch=6, seed_sample=lambda seed: data.generator.manual_seed(seed))
        for size in (1, 2)
    ]
    assert runs[0] == runs[1]
    assert not capfd.readouterr().err


class Reversed(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(22, -1, -1))

    def __len__(self) -> int:
        return 23


class Changing(Dataset[Any]):
    """Samples that show what the program has set: in the data set, in a transform that it has, and in `collate`."""

    def __init__(self) -> None:
        self.level, self.transforms, self.factor = 0, [{"size": 0}], 1

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[int, int]:
        return self.level, self.transforms[0]["size"]

    def collate(self, samples: list[tuple[int, int]]) -> list[int]:
        return [*samples[0], self.factor]


@pytest.mark.parametrize("evaluate", [False, True])
@pytest.mark.parametrize("processes", [0, 1])
def test_samples_follow_changes_between_passes(processes: int, evaluate: bool) -> None:
    data = Changing()
    loader = _world().loader(data, 4, evaluate=evaluate, num_workers=processes, collate_fn=data.collate)
    for level in range(3):
        data.level = data.transforms[0]["size"] = data.factor = level
        assert list(loader) == [[level] * 3] * 2


def test_close_ends_the_processes_of_an_unfinished_pass() -> None:
    others = set(multiprocessing.active_children())
    loader = _world().loader(Noisy(), 4, num_workers=1)
    unfinished = iter(loader)
    next(unfinished)
    assert set(multiprocessing.active_children()) - others
    loader.close()
    assert not set(multiprocessing.active_children()) - others


SEEDED = torch.Generator().manual_seed(3)


@pytest.mark.parametrize(
    "sampler",
    [
        Reversed(),
        RandomSampler(range(23)),
        RandomSampler(range(23), generator=SEEDED),
        WeightedRandomSampler([1.0, 5.0] * 11 + [1.0], 40),
    ],
    ids=["own", "random", "with a generator", "weighted"],
)
def test_samplers_choose_the_order_for_all_workers(sampler: Sampler[int]) -> None:
    orders = []
    for size in (1, 1, 2):
        found: dict[int, list[int]] = {}
        for rank in range(size):
            world = _world(rank, size)
            object.__setattr__(world, "gather", lambda value: [value])  # there is no other worker to ask
            loader = world.loader(Noisy(), global_batch=6, sampler=sampler)
            loader.begin(2)
            for numbers, _ in loader:
                found.setdefault(loader.steps_done, []).extend(numbers.tolist())
        orders.append(found)
    assert orders[0] == orders[1] == orders[2]
    assert sum(map(len, orders[0].values())) == len(sampler)  # type: ignore[arg-type]


def test_a_sampler_that_differs_is_refused() -> None:
    class Own(Reversed):
        generators = np.random.default_rng(1)

        def __iter__(self) -> Iterator[int]:
            return iter(self.generators.permutation(23).tolist())

    with pytest.raises(DataError, match="differs when it is drawn again"):
        next(iter(_world().loader(Noisy(), 4, sampler=Own())))
    world = _world()
    object.__setattr__(world, "gather", lambda value: [value, "another"])
    with pytest.raises(DataError, match="differs between the workers"):
        next(iter(world.loader(Noisy(), 4, sampler=Reversed())))


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        (Stream(), {"batch_size": 4}, "Stream has no length: give .* length="),
        (Stream(), {"batch_size": 4, "length": 3, "shuffle": True}, "leave out shuffle= and sampler="),
        (Stream(), {"batch_size": 4, "length": 0}, "length=: .* at least 1"),
        (Noisy(), {"batch_size": 4, "length": 3}, "length=: the number of an iterable data set's items"),
        (Noisy(0), {"batch_size": 4}, "Noisy is empty"),
        (Noisy(), {}, "give either batch_size= .* or global_batch="),
        (Noisy(), {"batch_size": 4, "global_batch": 8}, "give either batch_size= .* or global_batch="),
        (Noisy(), {"batch_size": 0}, "must be at least 1"),
        (Noisy(), {"batch_size": 4, "accumulate": 0}, "must be at least 1"),
        (Noisy(), {"batch_size": 4, "sampler": DistributedSampler(Noisy(), 2, 0)}, "DistributedSampler is not needed"),
        (Noisy(), {"batch_size": 4, "sampler": Reversed(), "shuffle": True}, "leave out shuffle="),
        (Noisy(), {"batch_size": 4, "evaluate": True, "shuffle": True}, "takes every sample once"),
        (Noisy(), {"batch_sampler": BatchSampler(Reversed(), 4, False)}, "batch_sampler=: .* by sampler="),
        (Noisy(), {"batch_size": 4, "generator": torch.Generator()}, "generator=: pass seed= instead"),
    ],
)
def test_what_contradicts_is_refused(data: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, DataError), match=message):
        _world().loader(data, **options)


class NoisyStream(IterableDataset[Any]):
    """Items in a random order: (number, three draws)."""

    def __init__(self, count: int = 23, splits: bool = False, announced: int | None = None):
        self.count, self.splits, self.announced, self.epoch = count, splits, announced, 0

    def __len__(self) -> int:
        return self.announced or self.count

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[tuple[int, torch.Tensor]]:
        numbers = torch.randperm(self.count).tolist()
        process = get_worker_info()
        if self.splits and process:
            numbers = numbers[process.id :: process.num_workers]
        for number in numbers:
            draws = [float(torch.rand(())), random.random(), np.random.rand(), self.epoch]
            yield number, torch.tensor(draws, dtype=torch.float64)


@pytest.mark.parametrize("processes", [0, 2])
def test_a_stream_has_the_same_steps_on_any_number_of_workers(processes: int) -> None:
    options = {"data": NoisyStream(), "global_batch": 6, "num_workers": processes}
    expected = _read(1, epoch=1, data=NoisyStream(), global_batch=6)
    assert sorted(number for step in expected for number in step) == list(range(23))
    assert {draws[3] for step in expected for draws in step.values()} == {1.0}
    for size in (1, 2, 3):
        assert _read(size, epoch=1, **options) == expected
    assert _read(2, epoch=1, start=2, **options) == expected[2:]
    assert _read(2, epoch=2, **options) != expected


def test_each_pass_over_a_stream_starts_it_again() -> None:
    loader = _world().loader(NoisyStream(), 6, num_workers=2)
    first, second = ([number for numbers, _ in loader for number in numbers.tolist()] for _ in range(2))
    assert first != second
    assert sorted(first) == sorted(second) == list(range(23))
    resumed = _world().loader(NoisyStream(), 6, num_workers=2)
    resumed.begin(1, 3)  # fewer batches are left than there are loader processes
    assert [sum(1 for _ in resumed) for _ in range(2)] == [1, 4]
    test = _world(1, 2).loader(NoisyStream(), 4, evaluate=True)
    once, again = ([number for numbers, _ in test for number in numbers.tolist()] for _ in range(2))
    assert once == again
    assert len(once) == 12
    for _ in test:
        break
    assert [number for numbers, _ in test for number in numbers.tolist()] == once


@pytest.mark.parametrize(
    ("stream", "options", "message"),
    [
        (NoisyStream(5, announced=6), {}, "ended after 5 of 6 items"),
        (NoisyStream(7, announced=6), {}, "has more items than its length, 6"),
        (NoisyStream(splits=True), {"num_workers": 2}, "leave out sharding of its own"),
        (Stream(), {"length": 4}, "ended after 3 of 4 items"),
    ],
)
def test_a_stream_of_another_length_is_refused(stream: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        list(_world().loader(stream, 2, **options))


class Moving(Stream):
    """Streams that do not start again with the same items."""

    def __init__(self, how: str):
        self.how, self.numbers, self.generator = how, iter(range(99)), np.random.default_rng(0)

    def __iter__(self) -> Iterator[int]:
        if self.how == "one generator":
            return self.numbers
        if self.how == "goes on":
            return (next(self.numbers) for _ in range(99))
        process = get_worker_info()
        if self.how == "shared by processes":
            return iter(range(process.id if process else 0, 99, 2))
        return iter(self.generator.permutation(99).tolist())


@pytest.mark.parametrize(
    ("how", "processes", "message"),
    [
        ("one generator", 0, "did not start again"),
        ("goes on", 0, "did not start again"),
        ("own generator", 0, "did not start again"),
        ("own generator", 2, "did not start again"),
        ("shared by processes", 2, "items differ between workers or loader processes"),
    ],
)
def test_streams_of_other_items_in_each_process_are_refused(how: str, processes: int, message: str) -> None:
    with pytest.raises(DataError, match=message):
        list(_world().loader(Moving(how), 2, length=10, num_workers=processes))


def test_streams_of_other_items_on_each_worker_are_refused() -> None:
    world = _world()
    object.__setattr__(world, "gather", lambda value: [value, "another"])
    with pytest.raises(DataError, match="items differ between workers"):
        list(world.loader(Stream(), 2, length=2))


def test_an_epoch_may_be_the_start_of_an_endless_stream() -> None:
    batches = list(_world().loader(Stream(), 2, length=2))
    assert [batch.tolist() for batch in batches] == [[0, 1]]


def test_batches_of_any_form_are_moved() -> None:
    class Named(Dataset[Any]):
        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> Any:
            return {"x": torch.ones(2), "names": ["a", "b"], "pair": (torch.zeros(1), index)}

    world = TrainingWorld(RankInfo(), torch.device("meta"))
    (batch,) = world.loader(Named(), 2, pin_memory=False)
    assert batch["x"].device.type == batch["pair"][0].device.type == "meta"
    assert batch["names"] == [("a", "a"), ("b", "b")]
    (kept,) = world.loader(Named(), 2, to_device=False, pin_memory=False)
    assert kept["x"].device.type == "cpu"


@pytest.mark.parametrize(
    ("options", "batch_size", "sampler"),
    [
        ({"batch_size": 4}, 4, SequentialSampler),
        ({"batch_size": 64, "shuffle": True}, 64, RandomSampler),
        ({"global_batch": 24, "accumulate": 3, "sampler": Reversed()}, 4, Reversed),
        ({"global_batch": 8, "evaluate": True}, 4, SequentialSampler),
    ],
)
def test_loaders_have_the_attributes_of_a_data_loader(options: Any, batch_size: int, sampler: type) -> None:
    data = Noisy()
    loader = _world(0, 2).loader(data, **options)
    assert loader.dataset is data
    assert loader.batch_size == batch_size
    assert type(loader.sampler) is sampler
    assert len(loader.sampler) == 23  # type: ignore[arg-type]
    assert _world().loader(Stream(), 2, length=3).sampler is None


def test_two_passes_at_once_are_refused() -> None:
    loader = _world().loader(Noisy(), 4)
    first = iter(loader)
    next(first)
    next(iter(loader))
    with pytest.raises(DataError, match="another pass over this loader has started"):
        next(first)
    with pytest.raises(DataError, match="has not delivered a batch yet"):
        print(_world().loader(Noisy(), 4).weight)
