"""The places at which a user's own loop writes checkpoints and stops: from there, a resumed run does nothing twice.

They are between two steps, at the end of the loader's pass, and where the epoch's body ends.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from lockstep.data.exact_loader import ExactLoader
from lockstep.data.seeded_samples import digest_of
from lockstep.launch.worker_exit import end_stopped
from lockstep.models.nested import leaves
from lockstep.run.accumulation import UnusedGradients
from lockstep.run.figures import LoopRecords
from lockstep.run.named_states import CHANGED, places_of
from lockstep.run.position import LoopPosition
from lockstep.run.session import Session, divides
from lockstep.world.generations import HostsChangedError

DIFFERS = (
    "{0}= differs between the workers: checkpoints have worker 0's, which a resumed run gives to all; to keep each, "
    "let its state_dict return world.gather(...) of them"
)
LOST = "{} ({}) {}, but checkpoints do not have its state: pass it, too, by a name of your choice, to save it"


class SavePoints:
    """Writes what is due. It waits for a later place while a worker holds gradients, which no checkpoint has.

    Args:
        held: Closed before the run stops.

    Attributes:
        is_optimized: Whether an optimizer has taken a step since the last one that was counted.
        is_counted: Whether a step was counted since the last batch was delivered.
        is_late: Whether a checkpoint is due, and waits.
    """

    def __init__(
        self,
        session: Session[LoopPosition],
        loader: ExactLoader | None,
        records: LoopRecords,
        gradients: UnusedGradients,
        held: ExitStack,
    ):
        self._session, self._records, self._gradients, self._held = session, records, gradients, held
        self.is_optimized, self.is_counted, self.is_late = False, True, False
        self._has_asked = self._is_stopping = self._has_compared = False
        self._optimizers: WeakSet[Optimizer] = WeakSet()  # that have taken a step, of the run or not
        own = [loader, *session.described.states.values()]
        others = (each for each in ExactLoader.all if each.sharding and all(each is not one for one in own))
        self._passes = WeakKeyDictionary({each: each.passes for each in others})  # of other training loaders

    def note_optimizer(self, *_: Any) -> None:
        """Note that an optimizer takes a step: its pre hook."""
        self.is_optimized = True

    def note_optimizers(self) -> RemovableHandle:
        """Note each optimizer of the process that takes a step, by a hook that keeps none, nor a run that was left."""
        noted = self._optimizers
        return register_optimizer_step_post_hook(lambda optimizer, *_: noted.add(optimizer))

    def count_step(self) -> None:
        self.is_optimized, self.is_counted = False, True

    def note_changes(self) -> None:
        described = self._session.described
        described.identity[CHANGED] = described.changes.now()

    def request(self, best: bool, is_place: bool) -> None:
        """Write a checkpoint here, if this is a place for it, else at the next one. Collective in any case."""
        if (not self._hold_gradients() or best) and is_place:
            self.note_changes()
            self.save(best)
            return
        self.is_late, position = True, self._session.progress
        if best:
            position.best_step = position.step

    def save(self, best: bool = False, durably: bool = True) -> None:
        """Write the state now. Collective."""
        self._records.store()
        if durably and not self._has_compared:
            self._has_compared = True
            self._compare()
            lost = [("an optimizer", type(each).__name__, "takes steps") for each in self._lost()]
            read = [each for each, passes in self._passes.items() if each.passes > passes]
            lost += [("a loader", type(each.dataset).__name__, "is read") for each in read]
            self._session.say([LOST.format(*each) for each in lost])
        self._session.save(best, durably)
        self.is_late = self.is_late and not durably

    def _compare(self) -> None:
        """Say which states of the program's own differ between the workers. Collective."""
        of_workers = nn.Module | Optimizer | ExactLoader
        states = {name: each for name, each in self._session.described.states.items() if name}
        own = {name: each.state_dict() for name, each in states.items() if not isinstance(each, of_workers)}
        digests = {
            name: digest_of([part for part in leaves(each) if not isinstance(part, DTensor)])
            for name, each in own.items()
        }
        rows = self._session.world.gather(digests)
        self._session.say([DIFFERS.format(name) for name in own if len({row[name] for row in rows}) > 1])

    def _lost(self) -> list[Optimizer]:
        """Return the optimizers of which no checkpoint has the state."""
        known, inner = set[int](), list[Any]()
        for each in self._session.described.states.values():
            if isinstance(each, ZeroRedundancyOptimizer):
                inner += [each, each.optim]  # its state_dict is collective
            elif not isinstance(each, nn.Module | ExactLoader):
                inner.append(each)
                known |= places_of([each.state_dict()])
        others = [each for each in self._optimizers if all(each is not other for other in inner)]
        return [each for each in others if not places_of(each.state.values()) <= known]

    def holds_gradients(self) -> bool:
        """Return whether gradients wait for an optimizer step; those that a counted step leaves do not."""
        return not self.is_counted and self._gradients.exist()

    def _hold_gradients(self) -> bool:
        """Return whether any worker does. Collective."""
        return any(self._session.world.gather(self.holds_gradients()))

    def end_step(self) -> None:
        """Write a checkpoint or a snapshot in memory if one is due, and stop if that was requested. Collective."""
        stopping = self._session.stopping
        if self._has_asked:
            self._session.say(self._session.described.changes.not_repeated())
        self._is_stopping = self._is_stopping or (self._has_asked and stopping.answer())
        durably = self._session.due(self._is_stopping)
        is_due = self.is_late or durably is not None
        if (is_due or self._is_stopping) and self._hold_gradients():
            self.is_late = True
        else:
            if is_due:
                self.note_changes()
                self.save(durably=self.is_late or bool(durably))
            if self._is_stopping:
                self._stop()
        stopping.ask()
        self._has_asked = True

    def end_epoch(self, is_last: bool) -> None:
        """Write the checkpoint that is due after an epoch. Collective."""
        position, every = self._session.progress, self._session.config.run.checkpoint_epochs
        is_best = 0 < position.step == position.best_step
        if self.is_late or is_last or divides(every, position.epoch):
            self.is_late = not is_last and not is_best and self._hold_gradients()
            if not self.is_late:
                self.save()

    def _stop(self) -> None:
        """Wait for the checkpoint, and disconnect.

        Raises:
            StoppedError, HostsChangedError: On all workers.
            CheckpointError: The checkpoint could not be written; raised on all workers.
        """
        stop, world = self._session.stop(), self._session.world
        if isinstance(stop, HostsChangedError):
            raise stop
        self._held.close()
        world.barrier()  # when one worker exits, the launcher stops the others, which may still be writing
        end_stopped(world.rank_info, str(stop))
        raise stop
