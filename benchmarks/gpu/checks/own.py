"""Checks of users' loops in one process: the same bits after a stop, FSDP2, captured graphs, waits of the host."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

from gpu.checking import Skip, run_checks
from gpu.device import DEVICE, ON_CUDA, ON_GPU, deterministic, synchronize
from gpu.jobs import one_worker
from gpu.nets import final_weights, lively_net, small_digits
from lockstep.data.sets import MemorySplit
from lockstep.files.jsonl import read_records
from lockstep.hvd.engine.settings import NO_TIMEOUT
from lockstep.run.connect import TrainingWorld
from lockstep.world import accelerator
from lockstep.world.rendezvous import serve_store

BATCH, STEPS = 96, 10  # an epoch of the 960 digits
STOP = 7  # in the middle of the first epoch
TakeStep = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # of a batch's images and labels, to its loss


class Loop:
    """A loop of one's own on the digits. Its network and its optimizer depend on the seed alone."""

    def __init__(self, folder: Path, scaled: bool = False, sharded: bool = False, capturable: bool = False) -> None:
        split = small_digits().train
        assert isinstance(split, MemorySplit)
        worker = one_worker()
        self.world = TrainingWorld(worker.rank_info, worker.device)
        torch.manual_seed(0)
        self.model = lively_net().to(DEVICE)
        self.sharded = sharded
        if sharded:
            fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, capturable=capturable)
        self.scaler = torch.amp.GradScaler(DEVICE.type, init_scale=2.0**12, enabled=scaled)
        images = split.images.float() / 255
        self.train = self.world.loader(list(zip(images, split.labels, strict=True)), BATCH, shuffle=True)
        state: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer, "scaler": self.scaler}
        self.run = self.world.run(folder, loader=self.train, log_every=STEPS, **state)

    def go_on(self, take_step: TakeStep | None = None, stop: int = 0) -> None:
        """Train to the end of the second epoch, or save and leave after a step."""
        for _ in self.run.epochs(2):
            for images, labels in self.train:
                loss = (take_step or self.take_step)(images, labels)
                self.run.step(loss=loss)
                if self.run.step_count == stop:
                    self.run.save()
                    self.run.close()
                    return
        self.run.close()

    def loss(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        half = torch.autocast(DEVICE.type, torch.float16) if self.scaler.is_enabled() else nullcontext()
        with half:
            return F.cross_entropy(self.model(images), labels)

    def take_step(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if self.sharded and not ON_CUDA:
            synchronize()  # the simulated GPU overwrites freed gradients of FSDP2's stream before they are read
        self.optimizer.zero_grad()
        loss = self.loss(images, labels)
        self.run.backward(self.scaler.scale(loss))
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.detach()


def _compare_whole_and_parts(**options: bool) -> None:
    with deterministic(), tempfile.TemporaryDirectory() as folder:
        weights = []
        for name, stops in (("whole", (0,)), ("parts", (STOP, 0))):
            for stop in stops:
                Loop(Path(folder, name), **options).go_on(stop=stop)
            weights.append(final_weights(Path(folder, name)))
    assert weights[0] == weights[1], "the weights after a stop and a resume differ from those without"


def check_a_stopped_loop_goes_on_with_the_same_bits() -> None:
    _compare_whole_and_parts()


def check_a_stopped_loop_with_a_gradscaler_goes_on_with_the_same_bits() -> None:
    if not ON_GPU:
        raise Skip("needs a GPU")
    _compare_whole_and_parts(scaled=True)


def check_a_stopped_loop_with_fsdp2_goes_on_with_the_same_bits() -> None:
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    try:
        _compare_whole_and_parts(sharded=True)
    finally:
        dist.destroy_process_group()


def check_a_captured_step_trains_like_a_plain_one() -> None:
    """The whole step in a CUDA graph, which the loop replays: `run.step` reads the loss outside of it."""
    if not ON_CUDA:
        raise Skip("needs CUDA")
    with deterministic(), tempfile.TemporaryDirectory() as folder:
        Loop(Path(folder, "plain"), capturable=True).go_on()
        captured = Loop(Path(folder, "captured"), capturable=True)
        captured.go_on(_captured(captured))
        plain, replayed = (_losses(Path(folder, name)) for name in ("plain", "captured"))
    # Dropout draws other numbers in a graph, so the bits differ.
    assert abs(plain - replayed) < 0.2, (plain, replayed)


def _captured(loop: Loop) -> TakeStep:
    graph = torch.cuda.CUDAGraph()
    images = torch.zeros(BATCH, 1, 8, 8, device=DEVICE)
    labels = torch.zeros(BATCH, dtype=torch.int64, device=DEVICE)
    weights = {name: value.clone() for name, value in loop.model.state_dict().items()}
    losses: list[torch.Tensor] = []

    def step() -> None:
        loop.optimizer.zero_grad(set_to_none=False)
        loss = loop.loss(images, labels)
        loss.backward()
        loop.optimizer.step()
        losses[:] = [loss.detach()]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph):
        step()
    loop.model.load_state_dict(weights)
    for state in loop.optimizer.state.values():
        for value in state.values():
            value.zero_()

    def replay(batch: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        images.copy_(batch)
        labels.copy_(classes)
        graph.replay()
        return losses[0].clone()

    return replay


def _losses(folder: Path) -> float:
    rows = [row for row in read_records(folder / "metrics.jsonl") if row["kind"] == "step"]
    return float(rows[-1]["loss"])


def check_the_host_does_not_wait_in_run_step() -> None:
    if not ON_CUDA:
        raise Skip("needs CUDA")
    with tempfile.TemporaryDirectory() as folder:
        loop = Loop(Path(folder, "run"))

        def watched(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            loss = loop.take_step(images, labels)
            # The first steps allocate; the report after STEPS reads the losses.
            torch.cuda.set_sync_debug_mode("error" if 2 <= loop.run.step_count < STEPS - 1 else "default")
            return loss

        try:
            loop.go_on(watched, stop=STOP)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def check_how_long_an_abort_of_the_library_takes() -> None:
    """In a group of one, as a survivor of a loss does it; the limit is that of the slowest recovery."""
    if not ON_GPU:
        raise Skip("needs a GPU")
    store, _ = serve_store()
    device = accelerator.current()
    group = accelerator.group(store, 0, 1, device, NO_TIMEOUT)
    tensor = torch.ones(1 << 20, device=device)
    group.allreduce([tensor]).wait()
    synchronize()
    start = time.perf_counter()
    group.abort()
    seconds = time.perf_counter() - start
    print(f"  the abort took {seconds:.2f} s", flush=True)
    assert seconds < 60, seconds
    assert float(tensor.sum()) == tensor.numel(), "the device does not compute after the abort"
    del store


def main() -> int:
    return run_checks(dict(globals()))
