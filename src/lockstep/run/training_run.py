"""The run of a user's own loop: its epochs and steps. Start with `TrainingRun`.

Between two steps, before the loader delivers the first batch of the next one, the run writes a checkpoint if one is
due or a stop was requested (`save_points`). So all that the loop's body does after `TrainingRun.step` is part of the
step. The other places are the end of the loader's pass, and that of the body: what is done between them is done once.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from lockstep.data.exact_loader import ExactLoader
from lockstep.errors import CheckpointError, ConfigError, DataError
from lockstep.run.accumulation import StepLosses, StepPasses, UnusedGradients
from lockstep.run.balance import Balance, ObservedTimes, OwnSeconds, check_measurable, rebalance
from lockstep.run.figures import LoopRecords
from lockstep.run.messages import naming_arguments
from lockstep.run.named_states import Extra, layers_of_wrapping
from lockstep.run.pass_end import PassEnd
from lockstep.run.position import LoopPosition, Pairs
from lockstep.run.random_state import RandomState
from lockstep.run.save_points import SavePoints
from lockstep.run.session import Session
from lockstep.world.generations import is_interruption

BALANCE_STEPS = 10  # between two comparisons of the workers' times
REFUSED_LOSS = (
    "step 1 used the loss as it is, but the workers' batches can have different numbers of samples, if only in an "
    "epoch's last step: call run.backward(loss) instead of loss.backward(), or multiply the loss by train.weight, or "
    "leave such steps out with drop_last=True"
)

CALLED_TWICE = (
    "run.step: called more often than the loader has delivered the batches of a step. Call it once after each "
    "optimizer.step(), read the loader once in an epoch, and do not read the next batch before run.step, or the "
    "checkpoint of a step would leave out a batch"
)


class TrainingRun:
    """A run of your own loop, opened by `TrainingWorld.run`.

    Attributes:
        extra: Values of yours, JSON or tensors, which checkpoints store, such as the best accuracy so far. Others
            raise ConfigError.
        folder: The run folder.
    """

    def __init__(
        self,
        session: Session[LoopPosition],
        random: RandomState,
        loader: ExactLoader | None,
        extra: Extra,
        figures: Mapping[str, Pairs],
    ):
        self._session, self._random, self._loader, self.extra = session, random, loader, extra
        self._world, self._position, self._config = session.world, session.progress, session.config
        self.held = ExitStack()  # what is closed at the end of the run
        self.folder = session.folder.path
        self.pass_end = PassEnd(self._world)
        modules = [each for each in session.described.states.values() if isinstance(each, nn.Module)]
        self._wrappers = [layer for each in modules for layer in layers_of_wrapping(each)]
        self._in_epoch = self._is_complete = False
        self._epochs = 0
        optimizers = [each for each in session.described.states.values() if isinstance(each, torch.optim.Optimizer)]
        self._records = LoopRecords(session, loader, optimizers, figures)
        self._gradients = UnusedGradients(session.described.models, optimizers)
        self._passes = StepPasses(session, loader, self._gradients)
        self._points = SavePoints(session, loader, self._records, self._gradients, self.held)
        self.held.callback(self._points.note_optimizers().remove)
        for optimizer in optimizers:
            self.held.callback(optimizer.register_step_pre_hook(self._points.note_optimizer).remove)
            self.held.callback(optimizer.register_step_post_hook(self._gradients.mark_used).remove)
        self._balance: Balance | None = None
        if loader is not None and loader.balances and self._world.size > 1:
            check_measurable(modules, self._world.device, "balance=True")
            self._balance, self._own_times = Balance(self._world, loader, self._position.step), ObservedTimes()

    @property
    def step_count(self) -> int:
        """The number of steps taken, over all sessions."""
        return self._position.step

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the numbers of the epochs up to `count`, from 0 or where the run was, and write checkpoints between.

        A run that was stopped in an epoch goes on in its middle: the body of the loop is entered again, and the loader
        delivers what is left, if only nothing.

        Raises:
            StoppedError: A stop was requested; raised on all workers, after a checkpoint. A program that does not catch
                it ends with exit code 75.
            CheckpointError: The last checkpoint cannot be written.
            ConfigError: The first epoch had batches, but no `step`.
        """
        position, loader, self._epochs = self._position, self._loader, count
        if position.epoch >= count and not self._world.rank_info.restart:
            self._session.say([f"{self.folder} has all of its {count} epochs: choose another folder to train again"])
        with naming_arguments(), self._session.stopping.listening(), self._random.epochs_entered():
            while position.epoch < count:
                self._random.begin_epoch(self._config.seed, position.epoch)
                if loader is not None:
                    loader.begin(position.epoch, position.step_in_epoch)
                    loader.between, loader.seed_step = self._between, self._seed_step
                    loader.ended, loader.left = self._end_pass, self._leave_pass
                else:
                    self._seed_step()
                self._in_epoch = True
                self._records.begin_step()
                yield position.epoch
                self._in_epoch = False
                if loader is not None and loader.steps_done and not position.step:
                    raise ConfigError("the epoch had batches, but no step: call run.step() after each optimizer.step()")
                self._end_epoch(count)
            self._random.begin_epoch(self._config.seed, position.epoch)  # for what follows, also in a complete run
            self._session.finish().check("training finished")
            self._is_complete = True

    def backward(self, loss: torch.Tensor, weight: float | torch.Tensor | None = None) -> None:
        """Run the backward pass of a batch's mean loss, weighted by its share of the step.

        The workers' average of the gradients is then that of the mean over the global batch, even if they have
        different numbers of samples.

        Args:
            loss: The mean over this worker's batch, a scalar; with a GradScaler, the scaled loss.
            weight: Over how much it is a mean if not over samples, such as the number of tokens or labeled pixels; a
                number or a scalar. Collective if given.

        Raises:
            ConfigError: `weight` in a step of several batches (accumulate=), but not once for each, or with FSDP2.
        """
        self._passes.run(loss, weight)

    @naming_arguments()
    def step(self, loss: float | torch.Tensor | None = None, **figures: float | torch.Tensor) -> None:
        """Count a step, on each worker, after the optimizer has taken it. Collective now and then.

        Args:
            loss: The mean loss over this worker's batch, whose weighted mean over all workers is recorded. If the step
                has several batches, and `backward` got the loss of each or a multiple, their mean is recorded.
            figures: Other means over this worker's batch, or its batches, to record.

        Raises:
            ConfigError: In the first step, if the loss must be weighted and was not; raised on all workers.
            NonFiniteLossError: A recorded mean loss is NaN or infinite; raised on all workers.
            ReplicasDifferError: The workers' weights differ; raised on all workers.
        """
        position, loader = self._position, self._loader
        if loader is not None:
            if not self._in_epoch:
                raise ConfigError("run.step: called outside of `for epoch in run.epochs(...)`")
            if loader.lacks_weights:
                raise ConfigError(REFUSED_LOSS)
            if not loader.completes_step:
                raise ConfigError("run.step: called within a step; with accumulate=, call it if train.completes_step")
            if position.step_in_epoch >= loader.steps_done:
                raise ConfigError(CALLED_TWICE)
        position.step_in_epoch += 1
        self._session.complete_step()
        self._points.count_step()
        position.has_recorded = False
        self._records.end_step()
        loss, weight = self._passes.end_step(loss)
        self._records.add(loss, figures, weight)
        self._session.check_replicas()
        if self._balance is not None and position.step % BALANCE_STEPS == 0:
            self._update_balance(self._balance)
        if position.step % self._config.run.log_every == 0:
            self._records.report()
        if loader is None:
            self._points.end_step()
            self._seed_step()

    def _update_balance(self, balance: Balance) -> None:
        rows = self._world.gather([BALANCE_STEPS * seconds for seconds in self._own_times.take()])
        seconds = [OwnSeconds(*row) for row in rows]
        rebalance(self._session, balance, seconds, BALANCE_STEPS, self._position.step_in_epoch)

    def record(self, **figures: float) -> None:
        """Record the results of an evaluation, equal on all workers, such as loss= and top1= (0 to 1)."""
        self._records.report_evaluation(self._position.epoch + self._in_epoch, self._epochs, figures)

    @naming_arguments()
    def save(self, best: bool = False) -> None:
        """Write a checkpoint of the state, in the background. Collective.

        Call it outside of a step: after `step`, after an evaluation, or before a batch's forward pass. It is written at
        once, or at a place from which a resumed run does nothing twice: outside of the loader's pass, when the pass
        begins or the epoch's body ends; and if no optimizer has used some gradients yet, after the next step.

        Args:
            best: Whether to keep it as the best one, `checkpoints/best`. In the loader's pass, it is written at once; a
                resumed run then repeats the batches whose gradients no optimizer had used.

        Raises:
            ReplicasDifferError, NonFiniteLossError: The weights differ or are not finite; raised on all workers.
            ConfigError: A state has a value that no checkpoint can store, or an optimizer has taken a step that `step`
                has not counted.
        """
        is_passing = self._loader is None or self._loader.is_passing
        if self._points.is_optimized and is_passing:
            raise ConfigError("run.save: called between optimizer.step() and run.step(); call it after run.step()")
        self._points.request(best, is_place=is_passing or not self._in_epoch)

    def _seed_step(self) -> None:
        """Seed the generators for the next step of the loader, of which a loop may take several until `step`."""
        loader, position = self._loader, self._position
        done = position.step_in_epoch if loader is None else loader.steps_done
        self._random.begin_step(self._config.seed, position.epoch, done, self._world.rank, agrees=loader is not None)

    @naming_arguments()
    def _between(self) -> None:
        """Called before each batch of the loader is made."""
        loader, position = self._loader, self._position
        assert loader is not None
        if not self._in_epoch:
            raise DataError("the run's loader is read outside of `for epoch in run.epochs(...)`")
        if position.step_in_epoch > loader.steps_done:
            raise ConfigError(CALLED_TWICE)
        if not loader.is_within_step:
            self._end_batches()
            self._records.begin_step()
        self._points.is_counted = False
        self._passes.losses.begin_batch()
        for model in self._wrappers:
            if isinstance(model, DistributedDataParallel):
                model.require_backward_grad_sync = loader.will_complete_step
            elif isinstance(model, FSDPModule):
                model.set_requires_gradient_sync(loader.will_complete_step)

    @naming_arguments()
    def _end_pass(self) -> None:
        """Called after the last batch of an epoch: an evaluation may follow."""
        self._note_pass_end(is_early=False)
        self._end_batches()
        self._seed_step()

    def _leave_pass(self) -> None:
        if self._in_epoch:
            self._note_pass_end(is_early=True)

    def _note_pass_end(self, is_early: bool) -> None:
        assert self._loader is not None
        self._points.note_changes()
        self.pass_end.note(self._position.epoch, self._loader.steps_done, is_early)

    def _end_batches(self) -> None:
        """Called where a step may have ended: by `step`, or by batches without one, as of a GAN's critic alone."""
        assert self._loader is not None
        if not self._points.holds_gradients():
            self._position.step_in_epoch = self._loader.steps_done  # the loop may have left out a batch
            self._passes.losses = StepLosses()  # those before an optimizer step, of a critic alone, are not this step's
        self._points.is_optimized = False
        self._points.end_step()

    def _end_epoch(self, count: int) -> None:
        if self._loader is not None and self._loader.is_passing:  # its iterator still exists
            self._note_pass_end(is_early=True)
        self._records.report()
        self._position.epoch += 1
        self._position.step_in_epoch = 0
        self._points.end_epoch(is_last=self._position.epoch >= count)

    def close(self) -> None:
        """End the run here, as after its last epoch: for a loop that is left before."""
        error = sys.exc_info()[1]  # in a `finally`
        if not (isinstance(error, Exception) and is_interruption(error)):
            if self._points.is_late and self._in_epoch and error is None:
                self._points.save()
            self._is_complete = True
        self.held.close()

    def end(self) -> None:
        """Close the records: at the end of the program at the latest."""
        if self._points.is_late:
            self._session.say(["run.save: not written, since its epoch was left: call run.close() after `break`"])
        if self._is_complete:
            self._session.record("end", exit_code=0)
            with suppress(CheckpointError):  # has been reported
                self._session.checkpoints.wait()
        self._session.close()
