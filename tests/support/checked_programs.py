"""Small training scripts, faulty and correct, for `lockstep check`: python checked_programs.py NAME."""

from __future__ import annotations

import contextlib
import io
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Subset,
    TensorDataset,
)

from lockstep.script_check.replicas import (
    ONE_MEAN,
    ONE_WRITER,
    SAME_AVERAGES,
    SAME_MODE,
    SAME_SETTINGS,
    SAME_START,
    SAME_WEIGHTS,
)
from lockstep.script_check.samples import (
    ALL_SAMPLES,
    AUGMENTED,
    EVALUATED,
    NEW_ORDER,
    OTHERS,
    SAME_CLASSES,
    SAME_LENGTH,
    SAME_SHARE,
)

SAMPLES, WIDTH, CLASSES, BATCH = 192, 8, 4, 16
rank = size = 0


def start() -> None:
    global rank, size
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()


def data(samples: int = SAMPLES) -> TensorDataset:
    made = torch.Generator().manual_seed(3)
    return TensorDataset(
        torch.randn(samples, WIDTH, generator=made), torch.randint(CLASSES, (samples,), generator=made)
    )


def net(seed: int | None = 0) -> nn.Sequential:
    if seed is not None:
        torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, CLASSES))


def replica() -> DistributedDataParallel:
    start()
    return DistributedDataParallel(net())


def sgd(model: nn.Module, **named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), **{"lr": 0.1, **named})


def sharded(dataset: Dataset[Any], **named: Any) -> DataLoader[Any]:
    return DataLoader(dataset, BATCH, sampler=DistributedSampler(dataset, **named))


def train(
    model: Callable[..., torch.Tensor],
    optimizer: torch.optim.Optimizer,
    loader: DataLoader[Any],
    epochs: int = 3,
    after: Callable[[int, torch.Tensor], None] = lambda step, loss: None,
    sets_epoch: bool = True,
    steps: Callable[[int, torch.Tensor], int] = lambda step, loss: 1,
) -> None:
    """Train; `after` is called between the backward pass and the step, and `steps` says how often to step."""
    number = 0
    for epoch in range(epochs):
        if sets_epoch and isinstance(loader.sampler, DistributedSampler):
            loader.sampler.set_epoch(epoch)
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), labels)
            loss.backward()
            after(number, loss)
            for _ in range(steps(number, loss)):
                optimizer.step()
            number += 1


def averaging(model: nn.Module, divide: float) -> Callable[[int, torch.Tensor], None]:
    def average(step: int, loss: torch.Tensor) -> None:
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad.div_(divide)  # type: ignore[union-attr]

    return average


@dataclass(frozen=True)
class Fault:
    """What `lockstep check` says of a faulty script: the question with the answer, words of it, and the line."""

    run: Callable[[], None]
    question: str
    words: str
    line: str
    kind: str
    verdict: str = "no"


FAULTS: dict[str, Fault] = {}
CORRECT: dict[str, Callable[[], None]] = {}


def fault(question: str, words: str, line: str, kind: str, verdict: str = "no") -> Callable[[Any], Any]:
    def add(run: Callable[[], None]) -> Callable[[], None]:
        FAULTS[run.__name__] = Fault(run, question, words, line, kind, verdict)
        return run

    return add


def correct(run: Callable[[], None]) -> Callable[[], None]:
    CORRECT[run.__name__] = run
    return run


# Faulty.


@fault(SAME_WEIGHTS, "inner module", "model(inputs)", "bypass")
def bare_model() -> None:
    start()
    model = net()
    DistributedDataParallel(model)
    train(model, sgd(model), sharded(data()))


@fault(SAME_WEIGHTS, "inner module", "model(inputs)", "bypass")
def inner_module() -> None:
    model = replica()
    train(model.module, sgd(model), sharded(data()))


@fault(SAME_WEIGHTS, "inner module", "model.module[0]", "bypass")
def part_of_module() -> None:
    model = replica()
    train(lambda inputs: model.module[2](torch.relu(model.module[0](inputs))), sgd(model), sharded(data()))


@fault(SAME_WEIGHTS, "inner module", "self.inner(inputs)", "bypass")
def loss_in_method() -> None:
    start()

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = net()

        def logits(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.inner(inputs)  # type: ignore[no-any-return]

    model = DistributedDataParallel(Net())
    train(lambda inputs: model.module.logits(inputs), sgd(model), sharded(data()))


@fault(SAME_WEIGHTS, "inner module", "model(inputs)", "bypass")
def compiled_inner_module() -> None:
    model = replica()
    train(torch.compile(model.module, backend="eager"), sgd(model), sharded(data()))


@fault(SAME_WEIGHTS, "not averaged", "optimizer.step()", "not averaged")
def no_wrapper() -> None:
    start()
    model = net()
    train(model, sgd(model), sharded(data()))


@fault(SAME_WEIGHTS, "not averaged", "optimizer.step()", "not averaged")
def no_wrapper_no_seed() -> None:
    start()
    model = net(None)
    train(model, sgd(model), sharded(data()))


@fault(SAME_WEIGHTS, "no process group", "optimizer.step()", "no group")
def no_group() -> None:
    model = net(None)
    train(model, sgd(model), DataLoader(data(), BATCH, shuffle=True))


@fault(OTHERS, "same 192 samples", "in loader:", "same samples")
def no_group_seeded() -> None:
    model = net()
    train(model, sgd(model), DataLoader(data(), BATCH, shuffle=True, generator=torch.Generator()))


@fault(SAME_START, "4 of 4", "optimizer.step()", "start")
def own_start() -> None:
    start()
    model = net(dist.get_rank())
    train(model, sgd(model), sharded(data()), after=averaging(model, size))


@fault(SAME_START, "first 2.weight", "optimizer.step()", "start")
def own_head() -> None:
    model = replica()
    torch.manual_seed(rank)
    nn.init.normal_(model.module[2].weight)
    train(model, sgd(model), sharded(data()))


@fault(SAME_START, "2 of 4 parameters differ before the first step, first 2.weight", "optimizer.step()", "start")
def own_head_of_loaded_model() -> None:
    start()
    model = net()
    torch.manual_seed(rank)
    model[2].reset_parameters()  # type: ignore[operator]
    train(model, sgd(model), sharded(data()), after=averaging(model, size))


@fault(SAME_START, "4 of 4", "optimizer.step()", "start")
def hvd_without_broadcast() -> None:
    import horovod.torch as hvd

    hvd.init()
    model = net(hvd.rank())
    optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters())
    loader = sharded(data(), num_replicas=hvd.size(), rank=hvd.rank())
    train(model, optimizer, loader)


@fault(SAME_WEIGHTS, "worker 0 skipped step 6", "optimizer.step()", "skipped")
def skips_on_high_loss() -> None:
    model = replica()
    train(model, sgd(model), sharded(data()), steps=lambda step, loss: 0 if rank == 0 and step == 5 else 1)


@fault(SAME_WEIGHTS, "worker 1 skipped step 8", "optimizer.step()", "skipped")
def skips_on_nan() -> None:
    model = replica()
    train(model, sgd(model), sharded(data()), steps=lambda step, loss: 0 if step == 7 and rank == 1 else 1)


@fault(SAME_WEIGHTS, "worker 1 took step 6 a second time", "optimizer.step()", "repeated")
def steps_twice() -> None:
    model = replica()
    train(model, sgd(model), sharded(data()), steps=lambda step, loss: 2 if rank == 1 and step == 4 else 1)


@fault(SAME_SETTINGS, "lr is", "optimizer.step()", "settings")
def rate_by_rank() -> None:
    model = replica()
    train(model, sgd(model, lr=0.1 * (rank + 1)), sharded(data()))


@fault(SAME_SETTINGS, "weight_decay is", "optimizer.step()", "settings")
def decay_by_rank() -> None:
    model = replica()
    train(model, sgd(model, weight_decay=0.01 * rank), sharded(data()))


@fault(SAME_SETTINGS, "momentum is", "optimizer.step()", "settings")
def momentum_by_rank() -> None:
    model = replica()
    train(model, sgd(model, momentum=0.9 if rank else 0.8), sharded(data()))


@fault(SAME_SETTINGS, "lr is", "optimizer.step()", "settings")
def plateau_of_own_loss() -> None:
    model = replica()
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    train(model, optimizer, sharded(data()), after=lambda step, loss: scheduler.step(float(loss.detach())))


@fault(SAME_SETTINGS, "from step 7 on: lr is", "optimizer.step()", "settings")
def scheduler_on_rank_0() -> None:
    model = replica()
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    loader = sharded(data())
    for epoch in range(3):
        loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        train(model, optimizer, loader, epochs=1, sets_epoch=False)
        if rank == 0:
            scheduler.step()


@fault(SAME_WEIGHTS, "unfrozen after wrapping", "optimizer.step()", "added")
def added_later() -> None:
    model = replica()
    head = nn.Linear(CLASSES, CLASSES)
    model.module.append(head)
    train(model, sgd(model), sharded(data()))


@fault(SAME_WEIGHTS, "no_sync", "loss.backward()", "no_sync")
def never_synchronized() -> None:
    model = replica()
    with model.no_sync():
        train(model, sgd(model), sharded(data()))


@fault(SAME_WEIGHTS, "no_sync", "F.cross_entropy(model(inputs), labels).backward()", "no_sync")
def accumulates_wrongly() -> None:
    model = replica()
    optimizer, loader = sgd(model), sharded(data())
    for number, (inputs, labels) in enumerate(loader):
        with model.no_sync() if number % 2 else contextlib.nullcontext():
            F.cross_entropy(model(inputs), labels).backward()
        if number % 2:  # after the batch that is not synchronized; its gradients are added alone
            optimizer.step()
            optimizer.zero_grad()


@fault(ONE_MEAN, "sum", "optimizer.step()", "average")
def sum_of_workers() -> None:
    start()
    model = net()
    train(model, sgd(model), sharded(data()), after=averaging(model, 1))


@fault(ONE_MEAN, "twice", "optimizer.step()", "average")
def divided_twice() -> None:
    start()
    model = net()

    def average(step: int, loss: torch.Tensor) -> None:
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad.div_(size).div_(size)  # type: ignore[union-attr]

    train(model, sgd(model), sharded(data()), after=average)


@fault(ONE_MEAN, "the workers' sum", "optimizer.step()", "average")
def adds_up_after_ddp() -> None:
    start()
    model = DistributedDataParallel(net())
    train(model, sgd(model), sharded(data()), after=averaging(model, 1))


@fault(SAME_WEIGHTS, "nothing is trained", "optimizer.step()", "idle")
def optimizer_before_sharding() -> None:
    from torch.distributed.fsdp import fully_shard

    start()
    model = net()
    optimizer = sgd(model)
    train(fully_shard(model), optimizer, sharded(data()))


@fault(SAME_WEIGHTS, "worker 1 skipped step 6", "optimizer.step()", "skipped part")
def fsdp2_skips_on_high_loss() -> None:
    from torch.distributed.fsdp import fully_shard

    start()
    model = fully_shard(net())
    train(model, sgd(model), sharded(data()), steps=lambda step, loss: 0 if rank == 1 and step == 5 else 1)


def _loaded_on_rank_0() -> nn.Module:
    start()
    model = net()
    if rank == 0:
        model.load_state_dict(net(9).state_dict())
    return model


@fault(SAME_START, "only worker 0 loaded weights", "model.load_state_dict", "loaded part")
def fsdp2_of_weights_on_rank_0() -> None:
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(_loaded_on_rank_0())
    train(model, sgd(model), sharded(data()))


@fault(SAME_START, "only worker 1 loaded weights", "model.load_state_dict", "loaded part")
def fsdp2_loads_a_part() -> None:
    from torch.distributed.fsdp import fully_shard

    start()
    model = fully_shard(net())
    if rank == 1:
        model.load_state_dict({name: each / 2 for name, each in model.state_dict().items()})
    train(model, sgd(model), sharded(data()))


@fault(SAME_MODE, "worker 0 has 1 module in evaluation mode", "optimizer.step()", "mode")
def stays_in_evaluation_mode() -> None:
    start()
    model = DistributedDataParallel(nn.Sequential(*net(), nn.Dropout(0.1)))

    def stay(step: int, loss: torch.Tensor) -> None:
        if step == 6 and rank == 0:
            model.module[3].eval()

    train(model, sgd(model), sharded(data()), after=stay)


@fault(OTHERS, "same 192 samples", "in loader:", "same samples")
def same_seed() -> None:
    start()
    torch.manual_seed(0)
    model = DistributedDataParallel(net())
    train(model, sgd(model), DataLoader(data(), BATCH, shuffle=True))


@fault(OTHERS, "same 192 samples", "in loader:", "same samples")
def not_shuffled() -> None:
    model = replica()
    train(model, sgd(model), DataLoader(data(), BATCH))


@fault(OTHERS, "same samples", "optimizer.step()", "same samples")
def same_stream() -> None:
    model = replica()
    optimizer = sgd(model)
    torch.manual_seed(5)
    for _ in range(20):
        inputs = torch.randn(BATCH, WIDTH)
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), inputs.argmax(1) % CLASSES).backward()
        optimizer.step()


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(data())


@fault(OTHERS, "same samples", "in loader:", "same samples")
def same_iterable() -> None:
    model = replica()
    train(model, sgd(model), DataLoader(Stream(), BATCH))


@fault(OTHERS, "same 96 samples", "in loader:", "same samples")
def same_rank_in_sampler() -> None:
    model = replica()
    train(model, sgd(model), sharded(data(), num_replicas=size, rank=0))


@fault(ALL_SAMPLES, "samplers have other orders or splits", "in loader:", "split")
def own_seed_in_sampler() -> None:
    model = replica()
    train(model, sgd(model), sharded(data(), seed=rank))


@fault(OTHERS, "several workers", "in loader:", "overlap")
def other_seeds_no_sampler() -> None:
    model = replica()
    torch.manual_seed(rank)
    train(model, sgd(model), DataLoader(data(), BATCH, shuffle=True))


@fault(ALL_SAMPLES, "of another epoch", "in loader:", "another epoch")
def other_epochs() -> None:
    model = replica()
    optimizer, loader = sgd(model), sharded(data())
    for epoch in range(3):
        loader.sampler.set_epoch(epoch * size + rank)  # type: ignore[attr-defined]
        train(model, optimizer, loader, epochs=1, sets_epoch=False)


@fault(NEW_ORDER, "same order", "in loader:", "order")
def no_set_epoch_in_a_loop_for_all() -> None:
    model = replica()
    optimizer, dataset = sgd(model), data()
    parts = sharded(dataset), DataLoader(Subset(dataset, range(40)), BATCH)
    for loader in 3 * parts:
        with torch.set_grad_enabled(loader is parts[0]):
            for inputs, labels in loader:
                loss = F.cross_entropy(model(inputs), labels)
                if loss.requires_grad:
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()


@fault(NEW_ORDER, "same order", "in loader:", "order")
def no_set_epoch() -> None:
    model = replica()
    train(model, sgd(model), sharded(data()), sets_epoch=False)


@fault(NEW_ORDER, "same order", "in loader:", "order")
def seeds_each_epoch() -> None:
    model = replica()
    optimizer, dataset = sgd(model), data()
    part = Subset(dataset, range(rank, len(dataset), size))
    for _ in range(3):
        torch.manual_seed(0)
        train(model, optimizer, DataLoader(part, BATCH, shuffle=True), epochs=1)


@fault(ALL_SAMPLES, "96 of 192", "in loader:", "unread")
def unread_half() -> None:
    model = replica()
    train(model, sgd(model), sharded(data(), num_replicas=2 * size, rank=rank))


class SecondSplit(BatchSampler):
    """Delivers this worker's part of another sampler's batches, as Accelerate does."""

    def __init__(self, batch_sampler: BatchSampler) -> None:
        self.batch_sampler = batch_sampler

    def __iter__(self) -> Iterator[list[int]]:
        return islice(self.batch_sampler, rank, None, size)


@fault(ALL_SAMPLES, "48 of the 96", "in loader:", "unread")
def split_twice() -> None:
    model, dataset = replica(), data()
    batches = BatchSampler(DistributedSampler(dataset, shuffle=False), BATCH, drop_last=False)
    train(model, sgd(model), DataLoader(dataset, batch_sampler=SecondSplit(batches)))


@fault(ALL_SAMPLES, "other orders or splits", "in loader:", "mixed")
def files_in_another_order() -> None:
    start()
    made = torch.Generator().manual_seed(rank)
    inputs, labels = (tensor[torch.randperm(SAMPLES, generator=made)] for tensor in data().tensors)
    model = DistributedDataParallel(net())
    train(model, sgd(model), sharded(TensorDataset(inputs, labels)))


@fault(ALL_SAMPLES, "other orders or splits", "in loader:", "mixed")
def splits_by_own_seed() -> None:
    start()
    part, _ = torch.utils.data.random_split(data(), [160, 32], torch.Generator().manual_seed(rank))
    model = DistributedDataParallel(net())
    train(model, sgd(model), sharded(part))


@fault(SAME_CLASSES, "class_to_idx has another order", "in loader:", "classes")
def classes_in_own_order() -> None:
    model, dataset = replica(), data()
    dataset.class_to_idx = {name: (number + rank) % CLASSES for number, name in enumerate("abcd")}  # type: ignore[attr-defined]
    train(model, sgd(model), sharded(Subset(dataset, range(100))))


class PartOfStream(Stream):
    """Reads each worker's part, and perhaps not each loader process's."""

    def __init__(self, for_processes: bool) -> None:
        self.for_processes = for_processes

    def __iter__(self) -> Iterator[Any]:
        process = torch.utils.data.get_worker_info() if self.for_processes else None
        number, count = (process.id, process.num_workers) if process else (0, 1)
        return iter(Subset(data(), range(rank * count + number, SAMPLES, size * count)))


@fault(ALL_SAMPLES, "each process of the loader", "in loader:", "repeated")
def repeats_in_processes() -> None:
    start()
    model = DistributedDataParallel(net())
    train(model, sgd(model), DataLoader(PartOfStream(for_processes=False), BATCH, num_workers=2))


@fault(SAME_LENGTH, "6, 5 batches", "in loader:", "length")
def longer_on_rank_0() -> None:
    model = replica()
    dataset = data()
    part = Subset(dataset, range(rank, len(dataset) - 2 * BATCH * rank, size))
    train(model, sgd(model), DataLoader(part, BATCH, shuffle=True))


@fault(SAME_SHARE, "12 and 4", "optimizer.step()", "uneven")
def uneven_batches() -> None:
    model = replica()
    dataset = data()
    part = Subset(dataset, range(48) if rank else range(48, SAMPLES))
    train(model, sgd(model), DataLoader(part, 4 if rank else 12, shuffle=True))


@fault(SAME_SHARE, "targets", "optimizer.step()", "uneven")
def uneven_targets() -> None:
    model = replica()
    dataset = data()
    for number in range(len(dataset)):
        if number % size and number % 5:
            dataset.tensors[1][number] = -100
    train(model, sgd(model), sharded(dataset, shuffle=False))


def _with_penalty(on: range) -> None:
    model, loader = replica(), sharded(data(), shuffle=False)
    optimizer = sgd(model)
    for inputs, labels in chain(loader, loader):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), labels)
        if rank in on:
            loss = loss + 0.01 * torch.stack([each.square().sum() for each in model.parameters()]).sum()
        if rank:
            loss = 0.5 * loss  # as a batch's share, which may be 1 on a worker
        loss.backward()
        optimizer.step()


@fault(SAME_SHARE, "worker 0's loss has terms that worker 1's has not: Add of", "loss.backward()", "terms")
def penalty_on_rank_0() -> None:
    _with_penalty(range(1))


def evaluate(model: nn.Module, loader: DataLoader[Any], reduces: bool) -> float:
    right = torch.zeros(2)
    model.eval()
    with torch.no_grad():
        for inputs, labels in loader:
            right += torch.tensor([(model(inputs).argmax(1) == labels).sum(), len(labels)])
    if reduces:
        dist.all_reduce(right)
    model.train()
    return float(right[0] / right[1])


def _with_evaluation(evaluates: Callable[[DistributedDataParallel, Dataset[Any]], object]) -> None:
    model = replica()
    optimizer, loader, held = sgd(model), sharded(data()), data(100)
    for epoch in range(3):
        loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        train(model, optimizer, loader, epochs=1, sets_epoch=False)
        evaluates(model, held)


@fault(EVALUATED, "no results are added up", "in loader:", "evaluation")
def evaluates_own_part() -> None:
    _with_evaluation(lambda model, held: evaluate(model, sharded(held, shuffle=False), False))


@fault(EVALUATED, "50 of 100", "in loader:", "evaluation")
def evaluates_half() -> None:
    _with_evaluation(lambda model, held: evaluate(model, sharded(held, shuffle=False, num_replicas=4), True))


def shared_path() -> Path:
    names = [tempfile.mktemp()]
    dist.broadcast_object_list(names)
    return Path(names[0])


@fault(ONE_WRITER, "workers 0, 1 write ", "torch.save", "writer")
def all_save_one_file() -> None:
    model = replica()
    path = shared_path()
    train(model, sgd(model), sharded(data()), epochs=2)
    torch.save(model.state_dict(), path)
    dist.barrier()
    path.unlink(missing_ok=True)


@fault(EVALUATED, "no results are added up", "in loader:", "evaluation")
def fsdp2_evaluates_own_part() -> None:
    from torch.distributed.fsdp import fully_shard

    start()
    model, held = fully_shard(net()), data(100)
    optimizer, loader = sgd(model), sharded(data())
    for epoch in range(3):
        loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        train(model, optimizer, loader, epochs=1, sets_epoch=False)
        evaluate(model, sharded(held, shuffle=False), False)


class Noisy(Dataset[Any]):
    """Adds random numbers to each sample."""

    def __init__(self) -> None:
        self.data = data()

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, label = self.data[index]
        return inputs + torch.randn(WIDTH), label


def _with_noise(seed: int, processes: int) -> None:
    model = DistributedDataParallel(net())
    dataset = Noisy()
    torch.manual_seed(seed)
    loader = DataLoader(dataset, BATCH, sampler=DistributedSampler(dataset), num_workers=processes)
    train(model, sgd(model), loader)


@fault(AUGMENTED, "same random numbers", "in loader:", "augmentation", "hint")
def same_noise() -> None:
    start()
    _with_noise(0, 0)


@fault(AUGMENTED, "same random numbers", "in loader:", "augmentation", "hint")
def same_noise_in_processes() -> None:
    start()
    _with_noise(0, 1)


def _with_batch_norm(averages: bool) -> None:
    start()
    model = net()
    model.insert(1, nn.BatchNorm1d(16))
    wrapped, loader = DistributedDataParallel(model), sharded(data())
    optimizer = sgd(wrapped)
    for epoch in range(3):
        loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        train(wrapped, optimizer, loader, epochs=1, sets_epoch=False)
        for buffer in model.buffers() if averages else ():
            dist.all_reduce(buffer)
            buffer.copy_(buffer / size)
        if rank == 0:
            torch.save({"epoch": epoch, "model": model.state_dict()}, io.BytesIO())


@fault(SAME_AVERAGES, "own batches", "torch.save", "batch norm", "hint")
def saves_own_averages() -> None:
    _with_batch_norm(averages=False)


@fault(SAME_WEIGHTS, "step 7 on", "optimizer.step()", "changed")
def loads_on_rank_0() -> None:
    model = replica()

    def load(step: int, loss: torch.Tensor) -> None:
        if step == 6 and rank == 0:
            model.module.load_state_dict(net(9).state_dict())

    train(model, sgd(model), sharded(data()), after=load)


@fault(SAME_WEIGHTS, "states differ", "optimizer.step()", "changed")
def state_on_rank_0() -> None:
    model = replica()
    optimizer = sgd(model, momentum=0.9)
    for parameter in model.parameters():
        if rank == 0:
            optimizer.state[parameter]["momentum_buffer"] = torch.ones_like(parameter)
    train(model, optimizer, sharded(data()))


@fault(OTHERS, "same 192 samples", "in loader:", "same samples")
def accelerate_unprepared_loader() -> None:
    from accelerate import Accelerator

    helper = Accelerator(cpu=True)
    model = net()
    model, optimizer = helper.prepare(model, sgd(model))
    torch.manual_seed(0)
    train(model, optimizer, DataLoader(data(), BATCH, shuffle=True))


@fault(SAME_WEIGHTS, "inner module", "model(inputs)", "bypass")
def accelerate_bare_model() -> None:
    from accelerate import Accelerator

    helper = Accelerator(cpu=True)
    model = net()
    wrapped, optimizer, loader = helper.prepare(model, sgd(model), DataLoader(data(), BATCH, shuffle=True))
    train(helper.unwrap_model(wrapped), optimizer, loader)


@fault(OTHERS, "same 192 samples", "in loader:", "same samples")
def fsdp2_same_data() -> None:
    from torch.distributed.fsdp import fully_shard

    start()
    model = fully_shard(net())
    torch.manual_seed(0)
    train(model, sgd(model), DataLoader(data(), BATCH, shuffle=True))


@fault(SAME_SETTINGS, "lr is", "optimizer.step()", "settings")
def fsdp2_rate_by_rank() -> None:
    from torch.distributed.fsdp import fully_shard

    start()
    model = fully_shard(net())
    train(model, sgd(model, lr=0.1 + 0.1 * rank), sharded(data()))


def _lightning(**named: Any) -> None:
    import lightning

    class Task(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def training_step(self, batch: Any, number: int) -> torch.Tensor:
            return F.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return sgd(self, lr=named.get("rates", lambda rank: 0.1)(self.global_rank))

    trainer = lightning.Trainer(
        max_epochs=3,
        accelerator="cpu",
        devices=named.get("devices", 2),
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
        use_distributed_sampler=named.get("samples", True),
        strategy="ddp",
    )
    torch.manual_seed(0)
    trainer.fit(Task(), DataLoader(data(), BATCH, shuffle=True))


@fault(OTHERS, "same samples", "trainer.fit", "same samples")
def lightning_same_data() -> None:
    _lightning(samples=False)


@fault(SAME_SETTINGS, "lr is", "trainer.fit", "settings")
def lightning_rate_by_rank() -> None:
    _lightning(rates=lambda rank: 0.1 + rank)


# Correct.


@correct
def ddp() -> None:
    start()
    model = DistributedDataParallel(net(None))
    train(model, sgd(model), sharded(data()))


@correct
def penalty_on_all_ranks() -> None:
    _with_penalty(range(size))


@correct
def term_for_one_class_in_few_steps() -> None:
    model, dataset = replica(), data()
    dataset.tensors[1].copy_(torch.arange(SAMPLES) % size)  # by chance, each batch of worker 0 has this class
    optimizer = sgd(model)
    for inputs, labels in sharded(dataset, shuffle=False):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), labels)
        if (labels == 0).any():
            loss = loss + 0.01 * model(inputs).square().mean()
        loss.backward()
        optimizer.step()


@correct
def one_more_pass_on_rank_0() -> None:
    model = replica()
    optimizer, loader = sgd(model), sharded(data())
    for epoch, trains in [(0, False)] * (not rank) + [(0, True), (1, True), (2, True)]:
        loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        for inputs, labels in loader:
            if trains:
                optimizer.zero_grad()
                F.cross_entropy(model(inputs), labels).backward()
                optimizer.step()


@correct
def ddp_adam_scheduler() -> None:
    model = replica()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)
    loader = sharded(data())
    for epoch in range(3):
        loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        train(model, optimizer, loader, epochs=1, sets_epoch=False)
        scheduler.step()


@correct
def ddp_step_that_raises() -> None:
    model = replica()
    optimizer = sgd(model)

    def fail() -> float:
        raise ZeroDivisionError

    with contextlib.suppress(ZeroDivisionError):
        optimizer.step(fail)
    train(model, optimizer, sharded(data()))


@correct
def ddp_compiled() -> None:
    model = replica()
    train(torch.compile(model, backend="eager"), sgd(model), sharded(data()))


@correct
def compiled_before_ddp() -> None:
    start()
    model = DistributedDataParallel(torch.compile(net(), backend="eager"))
    train(model, sgd(model), sharded(data()))


@correct
def ddp_uneven_data() -> None:
    model = replica()
    train(model, sgd(model), sharded(data(SAMPLES - 5)))


@correct
def ddp_loader_processes() -> None:
    model = replica()
    dataset = data()
    loader = DataLoader(dataset, BATCH, sampler=DistributedSampler(dataset), num_workers=2, persistent_workers=True)
    train(model, sgd(model), loader)


@correct
def ddp_accumulates() -> None:
    model = replica()
    optimizer, loader = sgd(model), sharded(data())
    number = 0
    for epoch in range(3):
        loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        for inputs, labels in loader:
            number += 1
            with contextlib.nullcontext() if number % 2 == 0 else model.no_sync():
                (F.cross_entropy(model(inputs), labels) / 2).backward()
            if number % 2 == 0:
                optimizer.step()
                optimizer.zero_grad()


@correct
def ddp_joins() -> None:
    model = replica()
    dataset = data()
    part = Subset(dataset, range(120) if rank else range(120, SAMPLES))
    with model.join():
        train(model, sgd(model), DataLoader(part, BATCH, shuffle=True), epochs=2)


@correct
def ddp_joins_in_each_epoch() -> None:
    model = replica()
    part = Subset(data(), range(120) if rank else range(120, SAMPLES))
    loader, optimizer = DataLoader(part, BATCH, shuffle=True), sgd(model)
    for _ in range(2):
        with model.join():
            train(model, optimizer, loader, epochs=1)


@correct
def ddp_frozen() -> None:
    start()
    model = net()
    model[0].requires_grad_(False)
    wrapped = DistributedDataParallel(model)
    train(wrapped, sgd(model[2]), sharded(data()))


@correct
def ddp_batch_norm() -> None:
    start()
    model = net()
    model.insert(1, nn.BatchNorm1d(16))
    wrapped = DistributedDataParallel(model)
    train(wrapped, sgd(wrapped), sharded(data()))


@correct
def ddp_saves_mean_averages() -> None:
    _with_batch_norm(averages=True)


@correct
def ddp_noise() -> None:
    start()
    _with_noise(rank, 0)


@correct
def ddp_noise_in_processes() -> None:
    start()
    _with_noise(rank, 1)


@correct
def ddp_average() -> None:
    model = replica()
    average = torch.optim.swa_utils.AveragedModel(model.module)
    train(model, sgd(model), sharded(data()), after=lambda step, loss: average.update_parameters(model.module))


@correct
def ddp_evaluates() -> None:
    _with_evaluation(lambda model, held: evaluate(model, sharded(held, shuffle=False), True))


@correct
def ddp_evaluates_on_rank_0() -> None:
    def evaluate_there(model: DistributedDataParallel, held: Dataset[Any]) -> None:
        if rank == 0:
            evaluate(model.module, DataLoader(held, BATCH), False)
        dist.barrier()

    _with_evaluation(evaluate_there)


@correct
def ddp_evaluates_all_on_each() -> None:
    _with_evaluation(lambda model, held: evaluate(model, DataLoader(held, BATCH), False))


@correct
def ddp_updates_batch_norm() -> None:
    start()
    model = net()
    model.insert(1, nn.BatchNorm1d(16))
    wrapped, loader = DistributedDataParallel(model), sharded(data())
    average = torch.optim.swa_utils.AveragedModel(model)
    train(wrapped, sgd(wrapped), loader, after=lambda step, loss: average.update_parameters(model))
    torch.optim.swa_utils.update_bn(loader, average)


@correct
def ddp_ignores_parameters() -> None:
    start()
    model = net()
    nn.init.constant_(model[0].bias, rank)  # type: ignore[arg-type]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["0.bias"])
    wrapped = DistributedDataParallel(model)
    train(wrapped, sgd(wrapped), sharded(data()))


@correct
def ddp_feature_of_module() -> None:
    model = replica()
    optimizer, loader = sgd(model), sharded(data())
    for epoch in range(3):
        loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        for inputs, labels in loader:
            with torch.no_grad():
                model.module[0](inputs)
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()


@correct
def gan() -> None:
    start()
    maker = DistributedDataParallel(nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, WIDTH)))
    judge = DistributedDataParallel(nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, 1)))
    makes, judges = torch.optim.Adam(maker.parameters(), 1e-3), torch.optim.Adam(judge.parameters(), 1e-3)
    loader = sharded(data())
    torch.manual_seed(rank)
    for epoch in range(3):
        loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        for inputs, _ in loader:
            judges.zero_grad()
            made = maker(torch.randn(len(inputs), 4))
            (F.softplus(-judge(inputs)).mean() + F.softplus(judge(made.detach())).mean()).backward()
            judges.step()
            makes.zero_grad()
            F.softplus(-judge(made)).mean().backward()
            makes.step()


@correct
def own_average() -> None:
    start()
    model = net()
    train(model, sgd(model), sharded(data()), after=averaging(model, size))


@correct
def own_sum_of_parts() -> None:
    start()
    model = net()
    optimizer, loader = sgd(model), sharded(data())
    for epoch in range(3):
        loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        for inputs, labels in loader:
            optimizer.zero_grad()
            (F.cross_entropy(model(inputs), labels) / size).backward()
            averaging(model, 1)(0, torch.zeros(()))
            optimizer.step()


@correct
def local_sgd() -> None:
    start()
    model = net()
    count = 0

    def average(step: int, loss: torch.Tensor) -> None:
        nonlocal count
        count += 1
        if count % 4 == 0:
            for parameter in model.parameters():
                dist.all_reduce(parameter.data)
                parameter.data.div_(size)
                parameter.grad.zero_()  # type: ignore[union-attr]

    train(model, sgd(model), sharded(data()), after=average)


@correct
def average_of_neighbors() -> None:
    start()
    model = net()

    def average(step: int, loss: torch.Tensor) -> None:
        for parameter in model.parameters():
            other = torch.empty_like(parameter)
            sent = dist.P2POp(dist.isend, parameter.grad, 1 - rank)  # type: ignore[arg-type]
            for work in dist.batch_isend_irecv([sent, dist.P2POp(dist.irecv, other, 1 - rank)]):
                work.wait()
            parameter.grad.add_(other).div_(2)  # type: ignore[union-attr]

    train(model, sgd(model), sharded(data()), after=average)


@correct
def weight_averaging_at_epochs() -> None:
    start()
    model = net()
    loader = sharded(data())
    for epoch in range(3):
        loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        train(model, sgd(model), loader, epochs=1, sets_epoch=False)
        for parameter in model.parameters():
            dist.all_reduce(parameter.data)
            parameter.data.div_(size)


@correct
def hvd_optimizer() -> None:
    import horovod.torch as hvd

    hvd.init()
    model = net(None)
    optimizer = hvd.DistributedOptimizer(sgd(model, momentum=0.9), model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), 0)
    hvd.broadcast_optimizer_state(optimizer, 0)
    held = data(100)
    loader = sharded(data(), num_replicas=hvd.size(), rank=hvd.rank())
    for epoch in range(3):
        loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        train(model, optimizer, loader, epochs=1, sets_epoch=False)
        share = sharded(held, num_replicas=hvd.size(), rank=hvd.rank(), shuffle=False)
        hvd.allreduce(torch.tensor(evaluate(model, share, False)), name="accuracy")


@correct
def zero_optimizer() -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = replica()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    train(model, optimizer, sharded(data()))


@correct
def fsdp2() -> None:
    from torch.distributed.fsdp import fully_shard

    start()
    model = fully_shard(net())
    train(model, sgd(model), sharded(data()))


@correct
def fsdp1() -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    start()
    model = FullyShardedDataParallel(net(), device_id=torch.device("cpu"))
    train(model, sgd(model), sharded(data()))


@correct
def accelerate_loop() -> None:
    from accelerate import Accelerator

    helper = Accelerator(cpu=True)
    model = net()
    held = DataLoader(data(101), BATCH)
    model, optimizer, loader, held = helper.prepare(model, sgd(model), DataLoader(data(), BATCH, shuffle=True), held)
    for _ in range(3):
        train(model, optimizer, loader, epochs=1)
        model.eval()
        with torch.no_grad():
            for inputs, labels in held:
                helper.gather_for_metrics((model(inputs).argmax(1), labels))
        model.train()


@correct
def accelerate_accumulates() -> None:
    from accelerate import Accelerator

    helper = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = net()
    model, optimizer, loader = helper.prepare(model, sgd(model), DataLoader(data(), BATCH, shuffle=True))
    for _ in range(3):
        for inputs, labels in loader:
            with helper.accumulate(model):
                helper.backward(F.cross_entropy(model(inputs), labels))
                optimizer.step()
                optimizer.zero_grad()


@correct
def accelerate_averages_rarely() -> None:
    from accelerate import Accelerator
    from accelerate.local_sgd import LocalSGD

    helper = Accelerator(cpu=True)
    model = net()
    model, optimizer, loader = helper.prepare(model, sgd(model), DataLoader(data(), BATCH, shuffle=True))
    with LocalSGD(helper, model, local_sgd_steps=1000) as local:
        train(model, optimizer, loader, after=lambda step, loss: local.step())


@correct
def lightning_fit() -> None:
    _lightning()


@correct
def own_shards_stream() -> None:
    model = replica()
    optimizer = sgd(model)
    torch.manual_seed(rank)
    for _ in range(20):
        inputs = torch.randn(BATCH, WIDTH)
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), inputs.argmax(1) % CLASSES).backward()
        optimizer.step()


@correct
def evaluates_by_functional_collectives() -> None:
    from torch.distributed import _functional_collectives

    def evaluates(model: DistributedDataParallel, held: Dataset[Any]) -> None:
        right = torch.tensor(evaluate(model, sharded(held, shuffle=False), False))
        float(_functional_collectives.all_reduce(right, "sum", dist.group.WORLD))

    _with_evaluation(evaluates)


@correct
def evaluates_by_methods_of_the_group() -> None:
    def evaluates(model: DistributedDataParallel, held: Dataset[Any]) -> None:
        right = torch.tensor(evaluate(model, sharded(held, shuffle=False), False))
        dist.group.WORLD.allreduce([right]).wait()  # type: ignore[union-attr]

    _with_evaluation(evaluates)


@correct
def evaluates_by_the_store() -> None:
    def evaluates(model: DistributedDataParallel, held: Dataset[Any]) -> None:
        store = dist.distributed_c10d._get_default_store()
        store.set(f"result {rank}", str(evaluate(model, sharded(held, shuffle=False), False)))

    _with_evaluation(evaluates)


@correct
def evaluates_by_files() -> None:
    def evaluates(model: DistributedDataParallel, held: Dataset[Any]) -> None:
        path = shared_path()
        torch.save(evaluate(model, sharded(held, shuffle=False), False), f"{path}.{rank}")
        dist.barrier()
        Path(f"{path}.{1 - rank}").read_bytes()
        dist.barrier()
        Path(f"{path}.{rank}").unlink()

    _with_evaluation(evaluates)


@correct
def fsdp2_of_broadcast_weights() -> None:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(_loaded_on_rank_0())
    whole = net(9).state_dict() if rank == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, whole, options=options)
    train(model, sgd(model), sharded(data()))


@correct
def parts_of_each_batch() -> None:
    start()
    model = DistributedDataParallel(net())
    optimizer = sgd(model)
    for epoch in range(2):
        torch.manual_seed(epoch)
        for inputs, labels in DataLoader(data(), BATCH, shuffle=True):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs[rank::size]), labels[rank::size]).backward()
            optimizer.step()


@correct
def stream_for_processes() -> None:
    start()
    model = DistributedDataParallel(net())
    train(model, sgd(model), DataLoader(PartOfStream(for_processes=True), BATCH, num_workers=2))


class Mixed(Dataset[Any]):
    """Mixes each sample with another one, in an order of its own."""

    def __init__(self) -> None:
        self.data, self.others = data(), torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(rank))

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, label = self.data[index]
        return (3 * inputs + self.data[int(self.others[index])][0]) / 4, label


@correct
def data_mixed_in_own_order() -> None:
    start()
    model = DistributedDataParallel(net())
    train(model, sgd(model), sharded(Mixed()))


@correct
def own_average_clipped() -> None:
    start()
    model = net()

    def average(step: int, loss: torch.Tensor) -> None:
        averaging(model, size)(step, loss)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)

    train(model, sgd(model), sharded(data()), after=average)


@correct
def weighted_sampler() -> None:
    model = replica()
    torch.manual_seed(rank)
    sampler = torch.utils.data.WeightedRandomSampler([1.0] * SAMPLES, SAMPLES // size)
    train(model, sgd(model), DataLoader(data(), BATCH, sampler=sampler))


@correct
def own_subset() -> None:
    model = replica()
    dataset = data()
    part = Subset(dataset, range(rank, len(dataset), size))
    train(model, sgd(model), DataLoader(part, BATCH, shuffle=True))


@correct
def parts_of_model() -> None:
    start()
    model = net(dist.get_rank())
    optimizer = sgd(model)
    inputs, labels = data().tensors
    for _ in range(10):
        optimizer.zero_grad()
        out = model(inputs + rank)
        others = out.detach().clone()
        dist.all_reduce(others)
        F.cross_entropy(others - out.detach() + out, labels).backward()
        optimizer.step()


@correct
def scaler() -> None:
    model = replica()
    optimizer, loader = sgd(model), sharded(data())
    scales = torch.amp.GradScaler("cpu")
    for epoch in range(3):
        loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        for inputs, labels in loader:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.cross_entropy(model(inputs), labels)
            scales.scale(loss).backward()
            scales.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scales.step(optimizer)
            scales.update()


@correct
def own_loop() -> None:
    import lockstep

    world = lockstep.connect("cpu")
    model = world.prepare(net())
    loader = world.loader(data(), global_batch=BATCH * 2)
    optimizer = sgd(model)
    run = world.run("checked-run", loader=loader, model=model, optimizer=optimizer)
    for _ in run.epochs(3):
        for inputs, labels in loader:
            optimizer.zero_grad()
            run.backward(F.cross_entropy(model(inputs), labels))
            optimizer.step()
            run.step()


class Balanced(DistributedSampler[Any]):
    """Draws another third of the data in each epoch."""

    def __iter__(self) -> Iterator[int]:
        indices = list(super().__iter__())
        return iter(indices[: len(indices) // 3])


@correct
def sampler_of_a_part() -> None:
    model = replica()
    dataset = data()
    train(model, sgd(model), DataLoader(dataset, BATCH, sampler=Balanced(dataset)))


class Drawn(Dataset[Any]):
    """Draws samples at random."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.randn(WIDTH), index % CLASSES


@correct
def data_drawn_at_random() -> None:
    model = replica()
    torch.manual_seed(rank)
    train(model, sgd(model), DataLoader(Drawn(SAMPLES), BATCH))


def repeat(loader: DataLoader[Any]) -> Iterator[Any]:
    while True:
        yield from loader


@correct
def two_loaders() -> None:
    model = replica()
    optimizer, first, second = sgd(model), sharded(data()), sharded(data(SAMPLES - BATCH))
    for epoch in range(3):
        first.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        for (inputs, labels), (others, _) in zip(second, first, strict=False):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(torch.cat([inputs, others]))[: len(inputs)], labels)
            loss.backward()
            optimizer.step()
        second.sampler.set_epoch(epoch + 1)  # type: ignore[attr-defined]


@correct
def short_loader_repeats() -> None:
    model = replica()
    optimizer = sgd(model)
    part = Subset(data(), range(60) if rank else range(60, SAMPLES))
    batches = repeat(DataLoader(part, 12, shuffle=True, drop_last=True))
    for _ in range(40):
        inputs, labels = next(batches)
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()


@correct
def split_of_one_data_set() -> None:
    model = replica()
    torch.manual_seed(rank)
    own = range(rank, SAMPLES // 2, size)
    train(model, sgd(model), DataLoader(data(), BATCH, sampler=torch.utils.data.SubsetRandomSampler(own)))


@correct
def own_draws() -> None:
    model = replica()
    torch.manual_seed(rank)
    dataset = data()
    sampler = torch.utils.data.RandomSampler(dataset, num_samples=SAMPLES // size)
    train(model, sgd(model), DataLoader(dataset, BATCH, sampler=sampler))


@correct
def two_trainings() -> None:
    start()
    for rate in (0.1, 0.2):
        model = DistributedDataParallel(net())
        train(model, sgd(model, lr=rate), sharded(data()), epochs=1)


@correct
def hvd_joins() -> None:
    import horovod.torch as hvd

    hvd.init()
    model = net()
    optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters())
    dataset = data()
    part = Subset(dataset, range(120) if hvd.rank() else range(120, SAMPLES))
    train(model, optimizer, DataLoader(part, BATCH, shuffle=True), epochs=2)
    hvd.join()


@correct
def long_and_short_rows() -> None:
    model = replica()
    optimizer = sgd(model)
    torch.manual_seed(rank)
    for number in range(12):
        inputs = torch.randn(5 + 3 * ((number + rank) % 4), WIDTH)  # the nodes of a graph
        optimizer.zero_grad()
        model(inputs).logsumexp(1).mean().backward()
        optimizer.step()


@correct
def tensor_parallel() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    start()
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    model = parallelize_module(net(), init_device_mesh("cpu", (size,)), plan)
    torch.manual_seed(1)  # each worker needs the same batches
    train(model, sgd(model), DataLoader(data(), BATCH, shuffle=True))


@correct
def tensor_parallel_but_norm() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    start()
    model = net()
    model.insert(0, nn.LayerNorm(WIDTH))
    plan = {"1": ColwiseParallel(), "3": RowwiseParallel()}
    parallelize_module(model, init_device_mesh("cpu", (size,)), plan)
    torch.manual_seed(1)  # each worker needs the same batches
    train(model, sgd(model), DataLoader(data(), BATCH, shuffle=True))


@correct
def pipeline() -> None:
    start()
    first, second = nn.Linear(WIDTH, 16), nn.Linear(16, CLASSES)
    optimizer = sgd(second if rank else first)
    for inputs, labels in DataLoader(data(), BATCH):
        optimizer.zero_grad()
        if rank == 0:
            middle = first(inputs)
            dist.send(middle.detach(), 1)
            gradient = torch.empty_like(middle)
            dist.recv(gradient, 1)
            middle.backward(gradient)
        else:
            middle = torch.empty(BATCH, 16, requires_grad=True)
            dist.recv(middle.data, 0)
            F.cross_entropy(second(middle), labels).backward()
            dist.send(middle.grad, 0)  # type: ignore[arg-type]
        optimizer.step()


if __name__ == "__main__":
    globals()[sys.argv[1]]()
