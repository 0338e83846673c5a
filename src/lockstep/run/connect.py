"""A user's own training loop: the connection to the other workers, the model, the loaders and the run.

docs/howto/own-loop.md shows a loop. `lockstep.data.exact_loader` has the loaders, and `training_run` what a run keeps.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakSet

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Sampler

from lockstep.config.schema import BackendChoice, DeviceChoice, ParallelConfig, RunConfig, TrainConfig
from lockstep.data.exact_loader import ExactLoader, build_loader
from lockstep.data.shares import EvaluationShares
from lockstep.diagnosis.group_watch import watched_by_launcher
from lockstep.errors import ConfigError, LockstepError
from lockstep.files.output import report_to_launcher, say
from lockstep.run.data_parallel import replicate, synchronize_batch_norm
from lockstep.run.messages import naming_arguments
from lockstep.run.pass_end import PassEnd
from lockstep.run.public_calls import check_call, header
from lockstep.run.random_state import RandomState
from lockstep.script_check.fingerprints import call_of_script
from lockstep.world.generations import on_loss
from lockstep.world.launcher_environment import RankInfo
from lockstep.world.world import World
from lockstep.world.world import connect as connect_world

if TYPE_CHECKING:
    from lockstep.run.named_states import Stateful
    from lockstep.run.training_run import TrainingRun

Module = TypeVar("Module", bound=nn.Module)


@dataclass(frozen=True)
class TrainingWorld(World):
    """This worker, its device, and its connection to the other workers, for a training loop of your own.

    `rank`, `size`, `device` and `is_main` are as in every launcher. It ends with the program, or with a `with` block.
    """

    _open: ExitStack = field(default_factory=ExitStack, compare=False, repr=False)
    _meets_in_forward: list[str] = field(default_factory=list, compare=False, repr=False)
    _random: RandomState = field(default_factory=RandomState, compare=False, repr=False)
    _pass_ends: list[PassEnd] = field(default_factory=list, compare=False, repr=False)

    @property
    def random(self) -> Random:
        """A generator for choices that all workers must share, such as the size of the next images.

        Its numbers are equal on all workers as long as these draw equally often. A run seeds it before each epoch and,
        with `loader=`, before each step, so that a resumed run draws the same numbers. Its `getrandbits(63)` seeds
        generators of other kinds.
        """
        return self._random.agreed

    def prepare(self, model: Module, *, sync_bn: bool = False, find_unused_parameters: bool = False) -> Module:
        """Move a model to the device, and average its gradients over the workers.

        Args:
            model: The same on all workers; they all start with the weights of worker 0. A model whose parameters are
                sharded (FSDP2's `fully_shard`) is not prepared.
            sync_bn: Compute batch norm over the samples of all workers.
            find_unused_parameters: Whether some parameters get no gradient in some steps.

        Returns:
            The model in DistributedDataParallel, with the model as `module`; with a single worker, the model itself.

        Raises:
            ConfigError: `sync_bn` and a batch norm that does more than torch's.
        """
        if sync_bn:
            synchronize_batch_norm(model, self)
        model = model.to(self.device)
        if self.size == 1 or not any(parameter.requires_grad for parameter in model.parameters()):
            return model
        replica = replicate(model, self, find_unused_parameters)
        _replicas.add(replica)
        if any(True for _ in model.buffers()):
            self._meets_in_forward.append(type(model).__name__)
        return replica  # type: ignore[return-value]

    def loader(
        self,
        dataset: Any,
        batch_size: int | None = None,
        *,
        global_batch: int | None = None,
        shuffle: bool = False,
        sampler: Sampler[int] | None = None,
        batch_sampler: None = None,
        generator: None = None,
        drop_last: bool = False,
        accumulate: int = 1,
        balance: bool = False,
        evaluate: bool = False,
        length: int | None = None,
        seed: int = 0,
        seed_sample: Callable[[int], object] | None = None,
        to_device: bool = True,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool | None = None,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
    ) -> ExactLoader:
        """Return this worker's batches of a data set, as torch's DataLoader makes them.

        The samples of a step depend on the seed, the epoch and the global batch, not on the number of workers. The
        global generators of torch (on the CPU), NumPy and Python are seeded before each sample and each call of
        `collate_fn`, so that samples with random augmentation do not depend on it either. What `collate_fn` draws does.

        Args:
            dataset: The whole data set, the same on all workers: map-style, or iterable. Each worker and each loader
                process reads all items of an iterable one, and drops those of others. It may draw from the global
                generators, and have a method `set_epoch`.
            batch_size: Samples per worker and batch. A step has `batch_size` times `size` times `accumulate` samples.
            global_batch: Samples per step over all workers, instead: it must stay if a run is resumed on another number
                of workers.
            shuffle: Whether each epoch has another order, by `seed`.
            seed: Of the order and of the samples' random numbers. Loaders of one seed differ: those of a run by their
                names, others by the order in which they are made, which must be the same on all workers.
            sampler: The order of an epoch over the whole data set, instead: the same on all workers.
            batch_sampler, generator: Not available: `sampler` and `seed` replace them.
            drop_last: Leave out an epoch's last, smaller step. Otherwise, weight the loss: `TrainingRun.backward`.
            accumulate: Batches per step.
            balance: Let the workers' shares of a step follow their speeds, as `TrainingRun.step` measures them. The
                samples of a step stay, so results change by rounding alone, except for batch norm without `sync_bn`,
                dropout and random `collate_fn`s.
            evaluate: Each sample once, without padding, in order. If there are fewer samples than `batch_size * size`,
                some workers may have fewer batches.
            length: The number of samples of an epoch of an iterable data set; None: its `len`.
            seed_sample: Called with a number before each sample (of an iterable data set: before each epoch), for
                generators that are not the global ones.
            to_device: Copy tensors to the device of this worker.
            pin_memory: None: if the device copies from such memory in the background.
            persistent_workers: Whether loader processes stay between passes. They then never see what the program
                changes later in the data set, its transforms or `collate_fn`.

        The other arguments are DataLoader's.

        Raises:
            ConfigError: The arguments contradict each other, or some worker would have no batch in an evaluation.
            DataError: The data set is empty, or iterable without a length.
        """
        arguments = {name: value for name, value in locals().items() if name != "self"}
        loader = build_loader(self, **arguments, warn=lambda line: say(f"lockstep: {line}"))
        if not evaluate:
            self._random.add_loader(loader)
        elif isinstance(loader.shares, EvaluationShares) and not loader.shares.is_even:
            loader.between = self._check_evaluation
        return loader

    def _check_evaluation(self) -> None:
        if self.size > 1 and self._meets_in_forward:
            raise ConfigError(
                f"{self._meets_in_forward[0]} has buffers, which its workers compare in each forward pass, but some "
                "have fewer batches in this evaluation: pass a batch_size of at least 2, or call model.module"
            )

    @naming_arguments()
    def run(
        self,
        folder: str | Path,
        *,
        loader: ExactLoader | None = None,
        seed: int = 0,
        resume: bool = True,
        checkpoint_epochs: int = 1,
        checkpoint_steps: int = 0,
        keep: int = 3,
        log_every: int = 20,
        io_every: float = 5.0,
        check_replicas: int = 100,
        time_limit: str | None = None,
        tensorboard: bool = False,
        about: Mapping[str, str] | None = None,
        **state: nn.Module | Stateful,
    ) -> TrainingRun:
        """Open a run folder, and restore the state of its newest checkpoint, if there is one. Collective.

        Args:
            folder: For records and checkpoints; no other job can use it at the same time. All workers must see it.
            loader: The loader of the training.
            seed: Of the random numbers of the training steps, such as dropout.
            resume: Whether to go on from the folder's newest checkpoint. False: it must have none.
            checkpoint_epochs: Epochs between two checkpoints; 0: none at the ends of epochs but the last.
            checkpoint_steps: Steps between two checkpoints; 0: none.
            keep: The number of newest checkpoints to keep, besides the best.
            log_every: Steps between two records.
            io_every: Seconds between two records of the bytes that each worker reads and writes; 0: none.
            check_replicas: Steps between two comparisons of the workers' weights; 0: never.
            time_limit: Such as "2h": a checkpoint is written before it, and the program ends with exit code 75. None:
                the limit of the batch job, if it is known; "none".
            tensorboard: Whether to write the records for TensorBoard, too.
            about: Names for reports: of the data set as `data`, of the network as `arch`.
            state: What to save and restore, by names of your choice: models, optimizers, schedulers, a GradScaler, and
                whatever has `state_dict` and `load_state_dict`.

        Raises:
            ConfigError: An argument is invalid, or another job uses the folder; raised on all workers.
            CheckpointError: The checkpoint is damaged, or belongs to another job.
        """
        from lockstep.run.open_run import open_run  # half of what this module would import; a loop may do without

        config = TrainConfig(
            seed=seed,
            parallel=ParallelConfig(check_replicas=check_replicas),
            run=RunConfig(
                run_dir=Path(folder),
                resume="auto" if resume else None,
                checkpoint_epochs=checkpoint_epochs,
                checkpoint_steps=checkpoint_steps,
                keep=keep,
                log_every=log_every,
                io_every=io_every,
                time_limit=time_limit,
                track=("tensorboard",) if tensorboard else (),
            ),
        )
        self._random.name_loaders(loader, state)
        run = open_run(self, self._random, config, loader, state, about or {})
        self._open.push(run.held)
        _runs.add(run)
        self._pass_ends[:] = [run.pass_end]
        return run

    def group_for(self, tensor: torch.Tensor) -> Any:
        """Return torch's process group for a tensor's device, for a collective that follows at once."""
        for each in self._pass_ends:
            each.compare()
        return super().group_for(tensor)

    def highest(self, number: int) -> int:
        """Return the maximum of a number over the workers, which must be in the same call of the script."""
        call = call_of_script()
        return check_call(self, call, self.max_(torch.tensor(header(call, number, 0), device="cpu")).tolist())[0]

    def sum(self, value: float | torch.Tensor) -> Any:
        """Return the sum of a number over the workers, or of each element of a tensor. Collective.

        Returns:
            A float, or for several elements a tensor on the CPU, int64 or float64.

        Raises:
            ConfigError: The workers' tensors have different shapes; raised on all workers.
        """
        number = torch.float64
        own = value.detach() if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=number, device="cpu")
        if own.dim():
            shapes = self.gather(list(own.shape))
            if any(shape != own.shape for shape in map(torch.Size, shapes)):
                raise ConfigError(
                    f"world.sum: the workers' tensors have different shapes, {shapes}: make them equal, such as by "
                    f"torch.bincount(..., minlength=classes)"
                )
        if own.numel() == 1:
            return sum(self.gather(float(own)))
        return self.sum_(own.to("cpu", number if own.is_floating_point() else torch.int64, copy=True))

    def mean(self, value: float | torch.Tensor, weight: float | torch.Tensor = 1.0) -> float:
        """Return the mean of a number over the workers, weighted by such as the number of samples. Collective.

        Raises:
            ValueError: The weights are all 0.
        """
        own, share = (float(each.detach() if isinstance(each, torch.Tensor) else each) for each in (value, weight))
        total, weights = map(sum, zip(*self.gather([own * share if share else 0.0, share]), strict=True))
        if not weights:
            raise ValueError("mean: the weights of all workers are 0")
        return float(total / weights)

    def close(self) -> None:
        """Disconnect from the other workers; done at the end of the program, too."""
        self.__exit__(None, None, None)

    def __enter__(self) -> TrainingWorld:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _connected.clear()
        atexit.unregister(_close_at_exit)
        self._open.__exit__(kind, error, trace)


_connected: list[TrainingWorld] = []
_replicas = WeakSet[DistributedDataParallel]()
_runs = WeakSet["TrainingRun"]()
_of_parent: list[ExitStack] = []  # what a forked child must not close: the process group, the lock, the records
atexit.register(_of_parent.clear)  # while its generators can still end
os.register_at_fork(
    after_in_child=lambda: _of_parent.extend(
        each.pop_all() for each in [*(run.held for run in _runs), *(world._open for world in _connected)]
    )
)


def connect(device: DeviceChoice = "auto", backend: BackendChoice = "auto") -> TrainingWorld:
    """Connect this worker to the others, whichever launcher started it, and return its world. Collective.

    A program without a launcher is a single worker. A process group that the program has made, or `hvd.init`, is used
    as it is. A second call returns the same world.

    Args:
        device: "cpu", "cuda" or another kind that torch has; "auto": the accelerator if there is one.
        backend: The library for the device's collectives: "nccl", "xccl" or "gloo"; "auto": by the device.

    Raises:
        WorldError: The device is missing, or the others cannot be reached.
    """
    if _connected:
        return _connected[0]
    opened = ExitStack()
    world = opened.enter_context(connect_world(RankInfo.from_environment(), device, backend))
    _connected.append(TrainingWorld(world.rank_info, world.device, world.host_group, opened))
    atexit.register(_close_at_exit)
    if not faulthandler.is_enabled():
        faulthandler.enable(2)  # Gloo ends a process whose collective meets another one: show the script's line
    _set_exit_codes()
    return _connected[0]


def _set_exit_codes() -> None:
    """Let errors of Lockstep that the script does not catch end it with their exit codes, after their traceback."""
    show = sys.excepthook

    def exit_with_code(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        show(kind, error, trace)
        if isinstance(error, LockstepError) and not hasattr(sys, "ps1"):
            if watched_by_launcher():  # which prints the traceback by itself, and does not repeat what is final
                report_to_launcher("", False, error.exit_code, final=not error.retryable)
            raise SystemExit(error.exit_code)

    if show.__name__ != exit_with_code.__name__:  # not again in the next generation
        sys.excepthook = exit_with_code


def _close_after_loss(error: Exception) -> None:
    """Close everything: the work begins again."""
    for world in _connected:
        world.__exit__(type(error), error, None)
    for replica in tuple(_replicas):  # which others may refer to for a while, such as what torch.compile has left
        for name in ("reducer", "logger", "process_group"):  # that hold the group
            vars(replica).pop(name, None)
    _replicas.clear()


on_loss.append(_close_after_loss)


def _close_at_exit() -> None:
    """Disconnect at the end of the program, but not after an error: its peers must notice that this process exits."""
    error = getattr(sys, "last_value", None)
    for world in _connected:
        world.__exit__(type(error) if error else None, error, None)
