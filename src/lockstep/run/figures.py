"""The records of a user's own loop: weighted means over all workers, rates and times, and results of evaluations."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lockstep.data.exact_loader import ExactLoader
from lockstep.errors import NonFiniteLossError
from lockstep.run.position import LoopPosition, Pairs
from lockstep.run.session import Session
from lockstep.world.world import World


class Figures:
    """Weighted means over the steps since the last report, on the workers' devices until then."""

    def __init__(self, earlier: Mapping[str, Pairs]):
        """`earlier`: figures of an interrupted session, of all workers; on one of them."""
        self._pairs: dict[str, list[tuple[float | torch.Tensor, float | torch.Tensor]]] = {}
        self._earlier = dict(earlier)

    def add(self, figures: Mapping[str, float | torch.Tensor], weight: float | torch.Tensor) -> None:
        share = _scalar(weight)
        for name, value in figures.items():
            self._pairs.setdefault(name, []).append((_scalar(value), share))

    def own(self) -> dict[str, Pairs]:
        """Return each figure's numbers and weights in this worker's steps; waits for the device."""
        own = {name: list(pairs) for name, pairs in self._earlier.items()}
        for name, pairs in self._pairs.items():
            columns = map(_numbers, zip(*pairs, strict=True))
            own.setdefault(name, []).extend((number, weight) for number, weight in zip(*columns, strict=True) if weight)
        return {name: tuple(pairs) for name, pairs in own.items()}

    def gather(self, world: World) -> dict[str, Pairs]:
        """Return each figure's numbers and weights in the steps of all workers. Collective; waits for the device."""
        workers = world.gather(self.own())
        names = {name: None for worker in workers for name in worker}  # in order
        return {name: tuple(pair for worker in workers for pair in worker.get(name, ())) for name in names}

    def take(self, world: World) -> dict[str, float]:
        """Return the mean of each figure over all workers, and forget them. Collective; waits for the device."""
        found = self.gather(world)
        self.__init__({})  # type: ignore[misc]
        # fsum, so that the mean does not depend on the order, and so not on interruptions.
        return {
            name: math.fsum(number * weight for number, weight in pairs) / math.fsum(weight for _, weight in pairs)
            for name, pairs in found.items()
            if pairs
        }


def _scalar(value: float | torch.Tensor) -> float | torch.Tensor:
    return value.detach().reshape(()) if isinstance(value, torch.Tensor) else float(value)


def _numbers(scalars: Sequence[float | torch.Tensor]) -> list[float]:
    """Return the values of scalars, usually after one wait for their device."""
    tensors = [scalar for scalar in scalars if isinstance(scalar, torch.Tensor)]
    if len({tensor.device for tensor in tensors}) > 1:
        tensors = [tensor.cpu() for tensor in tensors]
    read = iter(torch.stack(tensors).cpu().double().tolist() if tensors else ())
    return [next(read) if isinstance(scalar, torch.Tensor) else scalar for scalar in scalars]


class LoopRecords:
    """Collects what the steps since the last report give.

    Args:
        earlier: Figures of an interrupted session, of all workers; on one of them.
    """

    def __init__(
        self,
        session: Session[LoopPosition],
        loader: ExactLoader | None,
        optimizers: Sequence[torch.optim.Optimizer],
        earlier: Mapping[str, Pairs],
    ):
        self._session, self._loader, self._optimizers = session, loader, optimizers
        self._figures = Figures(earlier)
        self._steps, self._seconds = 0, 0.0  # since the last report
        self.begin_step()

    def begin_step(self) -> None:
        self._began = time.perf_counter()

    def end_step(self) -> None:
        """Add the time of a step, after which the next one begins."""
        now = time.perf_counter()
        self._session.progress.seconds += now - self._began
        self._steps, self._seconds, self._began = self._steps + 1, self._seconds + now - self._began, now

    def add(self, loss: float | torch.Tensor | None, figures: Mapping[str, Any], weight: Any) -> None:
        self._figures.add({**({"loss": loss} if loss is not None else {}), **figures}, weight)

    def store(self) -> None:
        """Put the figures into the position, for a checkpoint. Collective; waits for the device."""
        self._session.progress.figures = self._figures.gather(self._session.world)

    def report(self) -> None:
        """Record the steps since the last report. Collective.

        Raises:
            NonFiniteLossError: The mean loss is NaN or infinite.
        """
        session, loader = self._session, self._loader
        rows = session.world.gather((0, 0.0) if loader is None else loader.take_times())
        figures, steps, seconds = self._figures.take(session.world), self._steps, self._seconds
        self._steps, self._seconds = 0, 0.0
        if not steps and not figures:
            return
        record: dict[str, Any] = {}
        if self._optimizers:
            record["lr"] = float(self._optimizers[0].param_groups[0]["lr"])
        if steps:
            record["steps_per_second"] = steps / seconds
        if loader is not None and steps:
            record["images_per_second"] = sum(samples for samples, _ in rows) / seconds
            record["data_wait"] = min(1.0, rows[0][1] / seconds)
        session.record("step", epoch=session.progress.epoch + 1, **record, **_split_figures(figures))
        session.record_energy(sum(samples for samples, _ in rows))
        if not math.isfinite(figures.get("loss", 0.0)):
            step = session.progress.step
            raise NonFiniteLossError(f"the mean loss is {figures['loss']} up to step {step:,}. {session.advise()}")

    def report_evaluation(self, epoch: int, epochs: int, figures: Mapping[str, float]) -> None:
        """Record the results of an evaluation."""
        self._session.record("epoch", split="val", epoch=epoch, epochs=epochs, **_split_figures(figures))
        self._session.progress.has_recorded = True


def _split_figures(figures: Mapping[str, float]) -> dict[str, Any]:
    """Return the fields of a record: the figures with fields of their own, and the others as metrics."""
    known = {name: float(value) for name, value in figures.items() if name in ("loss", "top1", "top5")}
    others = {name: float(value) for name, value in figures.items() if name not in known}
    return known | ({"metrics": others} if others else {})
