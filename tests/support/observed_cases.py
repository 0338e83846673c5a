"""Programs whose steps are observed: they count their own steps and samples, to be compared with the observer's.

Run as a script, it prints what the loops of one process count and what the observer does, as JSON by the loop's name.
"""

from __future__ import annotations

import json
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, TensorDataset

import lockstep
from lockstep.world.observer import Observer, observe

generator = torch.Generator().manual_seed(1)
IMAGES, LABELS = torch.randn(100, 32, generator=generator), torch.randint(0, 10, (100,), generator=generator)
PAIRS = TensorDataset(IMAGES, LABELS)
Counts = tuple[int, int]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(PAIRS)


class ReadyBatches(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(zip(IMAGES.split(20), LABELS.split(20), strict=True))


class ByList(Dataset[Any]):
    def __len__(self) -> int:
        return len(PAIRS)

    def __getitem__(self, indices: list[int]) -> Any:
        return IMAGES[indices], LABELS[indices]


class OwnStep(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 10))


def train(
    batches: Iterable[Any],
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    unpack: Callable[[Any], Any] = lambda batch: batch,
    compiled: bool = False,
) -> Counts:
    """Train for two epochs, evaluating after each; return the numbers of steps and samples."""
    model = network()
    called = torch.compile(model, backend="eager") if compiled else model
    own = optimizer(model.parameters(), lr=0.01)
    steps = samples = 0
    for _ in range(2):
        for batch in batches:
            images, labels = unpack(batch)
            own.zero_grad()
            cross_entropy(called(images), labels).backward()
            own.step()
            steps, samples = steps + 1, samples + len(images)
        for images, _ in DataLoader(PAIRS, 10):  # with gradients, but without a backward pass
            model(images)
    return steps, samples


def train_fetching_ahead() -> Counts:
    model, steps, samples = network(), 0, 0
    own = torch.optim.SGD(model.parameters(), lr=0.01)
    batches = iter(DataLoader(PAIRS, 16))
    batch = next(batches, None)
    while batch is not None:
        following = next(batches, None)
        model(batch[0]).mean().backward()
        own.step()
        steps, samples, batch = steps + 1, samples + len(batch[0]), following
    return steps, samples


def train_two_networks(critic_steps: int) -> Counts:
    """Train a GAN; the critic's steps count, as they are more frequent."""
    critic, maker = network(), nn.Linear(8, 32)
    own = [torch.optim.Adam(each.parameters()) for each in (critic, maker)]
    steps = samples = 0
    for images, _ in DataLoader(PAIRS, 16):
        for _ in range(critic_steps):
            own[0].zero_grad()
            (critic(maker(torch.randn(16, 8)).detach()).mean() - critic(images).mean()).backward()
            own[0].step()
            steps += 1
        own[1].zero_grad()
        (-critic(maker(torch.randn(16, 8))).mean()).backward()
        own[1].step()
        samples += len(images)
    return steps, samples


def train_with_an_optimizer_per_parameter() -> Counts:
    model, steps, samples = network(), 0, 0
    own = [torch.optim.SGD([parameter], lr=0.01) for parameter in model.parameters()]
    for images, labels in DataLoader(PAIRS, 16):
        cross_entropy(model(images), labels).backward()
        for each in own:
            each.step()
        steps, samples = steps + 1, samples + len(images)
    return steps, samples


def train_with_closures() -> Counts:
    """Train with LBFGS, whose step runs several backward passes."""
    model, steps, samples = network(), 0, 0
    own = torch.optim.LBFGS(model.parameters(), max_iter=3)
    for images, labels in DataLoader(PAIRS, 50):

        def loss(images: Any = images, labels: Any = labels) -> torch.Tensor:
            own.zero_grad()
            value = cross_entropy(model(images), labels)
            value.backward()
            return value

        own.step(loss)  # type: ignore[arg-type]
        steps, samples = steps + 1, samples + len(images)
    return steps, samples


def train_with_skipped_steps(fused: bool) -> Counts:
    """Train with GradScaler, accumulating over two batches; the third step is skipped."""
    model, steps, samples = network(), 0, 0
    own = torch.optim.SGD(model.parameters(), lr=0.01, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**15)
    for number, (images, labels) in enumerate(DataLoader(PAIRS, 10)):
        loss = cross_entropy(model(images), labels) * (float("inf") if number == 5 else 1)
        scaler.scale(loss).backward()
        samples += len(images)
        if number % 2:
            scale = scaler.get_scale()
            scaler.step(own)
            scaler.update()
            own.zero_grad()
            steps += scaler.get_scale() >= scale
    return steps, samples


def train_after_failed_steps() -> Counts:
    """Train with steps that raise an exception, which the loop handles; they do not count."""
    model, steps, samples = network(), 0, 0
    own = torch.optim.SGD(model.parameters(), lr=0.01)

    def fail() -> float:
        raise ValueError

    for images, labels in DataLoader(PAIRS, 16):
        cross_entropy(model(images), labels).backward()
        if steps == 2:
            with suppress(ValueError):
                own.step(fail)
            own = torch.optim.SGD(model.parameters(), lr=0.01)
        own.step()
        steps, samples = steps + 1, samples + len(images)
    return steps, samples


def train_on_a_loaders_first_batch(takes_one: bool) -> Counts:
    model, steps, samples = network(), 0, 0
    own = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(5):
        loader = iter(DataLoader(PAIRS, 16))
        images, labels = next(iter(DataLoader(PAIRS, 16)) if takes_one else loader)
        cross_entropy(model(images), labels).backward()
        own.step()
        steps, samples = steps + 1, samples + len(images)
    next(iter(DataLoader(PAIRS, 8)))  # looks at one
    model(next(iter(DataLoader(PAIRS, 16)))[0]).mean().backward()  # without a step
    return steps, samples + 16


def train_with_one_optimizer_after_the_other() -> Counts:
    steps = samples = 0
    networks = [network() for _ in range(3)]
    own = [torch.optim.SGD(each.parameters(), lr=0.01) for each in networks]
    for model, optimizer in zip(networks, own, strict=True):
        for images, labels in DataLoader(PAIRS, 16):
            cross_entropy(model(images), labels).backward()
            optimizer.step()
            steps, samples = steps + 1, samples + len(images)
    return steps, samples


def train_on_losses_of_a_generator() -> Counts:
    model, steps, samples = network(), 0, 0
    own = torch.optim.SGD(model.parameters(), lr=0.01)
    for images, labels in DataLoader(PAIRS, 16):
        own.zero_grad()
        torch.autograd.backward(cross_entropy(model(each), labels) for each in (images, 2 * images))
        both = model[0].bias.grad.clone()  # type: ignore[index, union-attr]
        own.zero_grad()
        torch.autograd.backward([cross_entropy(model(each), labels) for each in (images, 2 * images)])
        assert torch.equal(both, model[0].bias.grad), "a gradient is missing"  # type: ignore[index, union-attr, arg-type]
        own.step()
        steps, samples = steps + 1, samples + len(images)
    return steps, samples


class Node:
    """A batch without tensors that contains itself."""

    def __init__(self) -> None:
        self.parent = self


class Nodes(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter([Node(), Node(), Node()])


def train_without_tensors() -> Counts:
    model, steps = network(), 0
    own = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in DataLoader(Nodes(), batch_size=None):
        model(IMAGES).mean().backward()
        own.step()
        steps += 1
    return steps, 0


def train_by_hand(samples: int | None) -> Counts:
    """Train without an optimizer of torch, and say so at each step; an optimizer of another network does not count."""
    model, steps, counted = network(), 0, 0
    other = network()
    own = torch.optim.SGD(other.parameters(), lr=0.01)
    for images, labels in DataLoader(PAIRS, 16):
        cross_entropy(model(images), labels).backward()
        cross_entropy(other(images), labels).backward()
        own.step()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.01 * parameter.grad
                parameter.grad = None
        lockstep.step(samples)
        steps, counted = steps + 1, counted + (samples or len(images))
    return steps, counted


class BadItem(Dataset[Any]):
    """Images, one of which cannot be read."""

    def __len__(self) -> int:
        return len(PAIRS)

    def __getitem__(self, index: int) -> Any:
        if index == 40:
            raise OSError("cannot be read")
        return PAIRS[index]


def train_without_bad_batches() -> Counts:
    model, steps, samples = network(), 0, 0
    own = torch.optim.SGD(model.parameters(), lr=0.01)
    batches = iter(DataLoader(BadItem(), 18, num_workers=2))
    while True:
        try:
            images, labels = next(batches)
        except OSError:
            continue
        except StopIteration:
            return steps, samples
        cross_entropy(model(images), labels).backward()
        own.step()
        steps, samples = steps + 1, samples + len(images)


def as_rows(items: list[Any]) -> Any:
    return tuple(zip(*items, strict=True))


LOOPS: dict[str, Callable[[], Counts]] = {
    "plain": lambda: train(DataLoader(PAIRS, 16)),
    "loader processes": lambda: train(DataLoader(PAIRS, 16, num_workers=2, persistent_workers=True)),
    "out of order": lambda: train(DataLoader(PAIRS, 16, num_workers=2, in_order=False)),
    "batches of tuples": lambda: train(
        DataLoader(PAIRS, 16, collate_fn=as_rows), unpack=lambda rows: [torch.stack(each) for each in rows]
    ),
    "batches of an own class": lambda: train(
        DataLoader(PAIRS, 16, collate_fn=lambda items: UserDict(rows=torch.stack([image for image, _ in items]))),
        unpack=lambda batch: (batch["rows"], torch.zeros(len(batch["rows"]), dtype=torch.int64)),
    ),
    "iterable data": lambda: train(DataLoader(Stream(), 16)),
    "ready batches": lambda: train(DataLoader(ReadyBatches(), batch_size=None)),
    "lists of indices": lambda: train(
        DataLoader(ByList(), batch_size=None, sampler=BatchSampler(range(100), 16, drop_last=False))
    ),
    "overridden step": lambda: train(DataLoader(PAIRS, 16), optimizer=OwnStep),
    "compiled model": lambda: train(DataLoader(PAIRS, 20), compiled=True),
    "one batch ahead": train_fetching_ahead,
    "GAN": lambda: train_two_networks(1),
    "GAN, two critic steps": lambda: train_two_networks(2),
    "optimizer per parameter": train_with_an_optimizer_per_parameter,
    "LBFGS": train_with_closures,
    "failed steps": train_after_failed_steps,
    "first batch of loaders": lambda: train_on_a_loaders_first_batch(takes_one=True),
    "first batch of kept loaders": lambda: train_on_a_loaders_first_batch(takes_one=False),
    "one optimizer after the other": train_with_one_optimizer_after_the_other,
    "losses of a generator": train_on_losses_of_a_generator,
    "batches without tensors": train_without_tensors,
    "a batch that fails": train_without_bad_batches,
    "skipped step": lambda: train_with_skipped_steps(fused=False),
    "skipped step, fused": lambda: train_with_skipped_steps(fused=True),
    "said steps": lambda: train_by_hand(None),
    "said steps and samples": lambda: train_by_hand(7),
}


def main() -> None:
    torch.set_num_threads(1)
    observer = Observer()
    observe(observer)
    results = {}
    for name, loop in LOOPS.items():  # the last ones say when they take a step
        observer.begin_generation(None)
        counted = loop()
        observer.counts.subtract_skipped(unread=0)
        results[name] = [counted, (observer.counts.steps, observer.counts.samples)]
    print(json.dumps(results))


if __name__ == "__main__":
    main()
