"""Training with DistributedOptimizer on shares of a batch equals training of one process on all of it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable

import torch
from gradients import bits, close
from worker_group import on_hvd_workers

from lockstep import hvd

STEPS = 5
Parameters = Iterable[torch.Tensor]
OPTIMIZERS: dict[str, Callable[[Parameters], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD, Nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-3, nesterov=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=1.0),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.1, t0=2),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "Muon": lambda p: torch.optim.Muon(p, lr=0.01),
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=4),
    "LBFGS, strong Wolfe": lambda p: torch.optim.LBFGS(p, max_iter=4, line_search_fn="strong_wolfe"),
    "SparseAdam": lambda p: torch.optim.SparseAdam(p, lr=0.01),
}
if not hasattr(torch.optim, "Muon"):  # before torch 2.9
    del OPTIMIZERS["Muon"]
# Muon's own arithmetic is bfloat16, where the last bits of the gradient may tip a rounding.
TOLERANCES = {"Muon": 1e-3}


def new_model(name: str) -> torch.nn.Module:
    """With parameters that are less and more than a control message holds."""
    torch.manual_seed(0)
    if name == "SparseAdam":
        return torch.nn.EmbeddingBag(20, 30, sparse=True, dtype=torch.float64)
    model = torch.nn.Sequential(
        torch.nn.Linear(20, 30, bias=False), torch.nn.Tanh(), torch.nn.Linear(30, 3, bias=name != "Muon")
    )
    return model.to(torch.float64)


def losses_of(model: torch.nn.Module, name: str, step: int, samples: slice) -> torch.Tensor:
    """The mean loss of some of the step's 12 samples."""
    torch.manual_seed(step)
    if name == "SparseAdam":
        return model(torch.randint(20, (12, 4))[samples]).square().mean()
    inputs, labels = torch.randn(12, 20, dtype=torch.float64), torch.randint(3, (12,))
    return torch.nn.functional.cross_entropy(model(inputs[samples]), labels[samples])


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, name: str, samples: slice) -> list[str]:
    """Train, and return the parameters' bits after every step."""
    history = []
    for step in range(STEPS):

        def closure(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss = losses_of(model, name, step, samples)
            loss.backward()
            return loss.detach()  # LBFGS of torch 2.8 converts it to a float, with a warning if it has a graph

        if name.startswith("LBFGS") or step == 3:  # the others take closures too
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
        history.append(bits(model.parameters()))
    return history


@on_hvd_workers(3, name=OPTIMIZERS)
def test_shares_of_a_batch_train_like_the_whole_batch(rank: int, size: int, name: str) -> list[str]:
    model, make = new_model(name), OPTIMIZERS[name]
    whole = copy.deepcopy(model)
    optimizer = hvd.DistributedOptimizer(make(model.parameters()), named_parameters=model.named_parameters())
    history = train(model, optimizer, name, slice(rank, None, size))
    train(whole, make(whole.parameters()), name, slice(None))
    close(list(model.parameters()), list(whole.parameters()), TOLERANCES.get(name, 1e-9))
    assert len(set(history)) == STEPS
    return history  # bit-identical on all workers


def test_every_optimizer_of_torch_is_here() -> None:
    classes = {name.partition(",")[0] for name in OPTIMIZERS}
    assert classes == {name for name in dir(torch.optim) if name[0].isupper()} - {"Optimizer"}
