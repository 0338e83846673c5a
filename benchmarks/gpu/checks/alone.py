"""Checks in one process: NCCL driven directly, prefetching, precisions, resuming, clocks."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn
from torch.distributed import ReduceOp

from gpu.checking import Skip, run_checks
from gpu.device import DEVICE, ON_CUDA, ON_GPU, deterministic, size, synchronize
from gpu.jobs import noise, one_worker
from gpu.nets import digits_settings, final_weights, lively_net, small_digits, step_losses, train_digits
from lockstep import hvd
from lockstep.config.schema import AugmentConfig
from lockstep.data.loaders import TrainLoader, reader_for
from lockstep.data.readers import Placement
from lockstep.data.sets import Batch, FileSplit, ImageData, InputSpec, Split, describe_custom
from lockstep.data.sharding import Sharding
from lockstep.data.transforms import Mixing
from lockstep.hvd.engine.settings import NO_TIMEOUT
from lockstep.hvd.engine.transfers import DeviceTransfers, SetConnections
from lockstep.train import loop
from lockstep.train.fit import configure
from lockstep.train.job import Job
from lockstep.train.loop import take_step
from lockstep.train.setup import build_job
from lockstep.world import accelerator, machine
from lockstep.world.launcher_environment import RankInfo
from lockstep.world.rendezvous import serve_store
from lockstep.world.step_clock import StepClock
from lockstep.world.world import World

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.uint8)


def _only_on_gpu() -> None:
    if not ON_GPU:
        raise Skip("needs a GPU")


def _only_with_cuda() -> None:
    if not ON_CUDA:
        raise Skip("needs CUDA")


def check_the_device_is_there() -> None:
    tensor = torch.arange(1000, device=DEVICE)
    assert int(tensor.sum()) == 499_500
    if ON_CUDA:
        print(f"  {torch.cuda.get_device_name()}, torch {torch.__version__}, NCCL {torch.cuda.nccl.version()}")


def check_the_library_in_a_group_of_one() -> None:
    _only_on_gpu()
    store, _ = serve_store()
    device = accelerator.current()
    links = SetConnections(None, store, [0], 0)
    with links.on(device):  # creates the stream; a single worker has no group, so set one
        pass
    links._group = group = accelerator.group(store, 0, 1, device, NO_TIMEOUT)
    transfers, stream = DeviceTransfers(group, 0, 1), links._stream
    stream.wait_event(accelerator.current_stream(device).record_event())
    with accelerator.on(stream):
        for dtype in DTYPES:
            values = [torch.arange(count, device=DEVICE).remainder(100).to(dtype) for count in (1, 0, 1000, 1 << 20)]
            for operation in (ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT):
                given = [value.clone() for value in values]
                transfers.all_reduce(given, operation)
                assert all(map(torch.equal, given, values)), (dtype, operation)
            for value in values:
                given_one = value.clone()
                transfers.broadcast(given_one, 0)
                received, gathered = torch.empty_like(value), torch.empty_like(value)
                transfers.all_to_all([received], [value])
                transfers.all_gather(gathered, value)
                for result in (given_one, received, gathered):
                    assert torch.equal(result, value), dtype
    links.close()
    del store


def check_what_is_known_of_the_device() -> None:
    _only_on_gpu()
    device = accelerator.current()
    assert device == torch.device(DEVICE.type, torch.accelerator.current_device_index())
    assert accelerator.kind() == DEVICE.type
    assert accelerator.count() == torch.accelerator.device_count() == len(accelerator.names())
    assert accelerator.identity(device) == accelerator.identity(device) != ""
    assert 0 < accelerator.peak_memory(device) < accelerator.total_memory(device)
    assert accelerator.has_collectives(device.type)
    assert not accelerator.is_capturing(device)
    print(f"  {accelerator.identity(device)}; {', '.join(machine.drivers())}; {', '.join(accelerator.libraries())}")
    accelerator.seed(3)
    first = torch.rand(5, device=device)
    accelerator.seed(3)
    assert torch.equal(first, torch.rand(5, device=device))


def check_a_stream_is_on_for_the_thread_alone() -> None:
    _only_on_gpu()
    device = accelerator.current()
    before, stream = accelerator.current_stream(device), accelerator.new_stream(device)
    found: list[torch.Stream] = []
    with accelerator.on(stream):
        assert accelerator.current_stream(device) == stream != before
        thread = threading.Thread(target=lambda: found.append(accelerator.current_stream(device)))
        thread.start()
        thread.join()
    assert accelerator.current_stream(device) == before == found[0]


def check_capturing_a_graph_is_refused() -> None:
    _only_with_cuda()
    hvd.init()
    tensor, graph = torch.ones(3, device=DEVICE), torch.cuda.CUDAGraph()
    said = ""
    try:
        with torch.cuda.graph(graph):
            tensor.mul_(1)
            hvd.allreduce(tensor)
    except ValueError as error:
        said = str(error)
    assert "cannot be captured into a graph" in said
    hvd.shutdown()


def check_the_host_does_not_wait_in_a_step() -> None:
    """Detect waits with torch's sync debug mode, for the configurations in docs/explanation/performance.md."""
    _only_with_cuda()
    plain = loop.take_step

    def watched(job: Job, batch: Batch, position: int) -> None:
        torch.cuda.set_sync_debug_mode(
            "error" if job.progress.step >= 2 else "default"
        )  # after the first, which allocate
        try:
            plain(job, batch, position)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    cases: list[dict[str, Any]] = [{"precision": precision} for precision in ("fp32", "bf16", "O1", "O2", "O3")]
    cases += [{"optimizer": optimizer} for optimizer in ("adamw", "lars", "lamb")]
    cases += [{"precision": "O2", "optimizer": optimizer, "lr": 0.001} for optimizer in ("adamw", "lars", "lamb")]
    cases += [{"ema_decay": 0.9}, {"clip_norm": 1.0}, {"accumulate": 2}]
    loop.take_step = watched
    try:
        for settings in cases:
            with tempfile.TemporaryDirectory() as folder:
                train_digits(one_worker(), "lively", Path(folder), max_steps=8, **settings)
    finally:
        loop.take_step = plain


def check_hvd_alone_leaves_tensors_as_they_are() -> None:
    hvd.init()
    for dtype in DTYPES[:-1]:  # Horovod's all-reduce does not support bytes
        tensor = torch.arange(10, device=DEVICE).to(dtype)
        for result in (hvd.allreduce(tensor, op=hvd.Sum), hvd.allgather(tensor), hvd.broadcast(tensor, 0)):
            assert torch.equal(result, tensor), dtype
            assert result.device == tensor.device
    model = nn.Linear(5, 3, device=DEVICE)
    twin = nn.Linear(5, 3, device=DEVICE)
    twin.load_state_dict(model.state_dict())
    wrapped = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    plain = torch.optim.SGD(twin.parameters(), lr=0.1)
    images = torch.randn(7, 5, device=DEVICE)
    for network, optimizer in ((model, wrapped), (twin, plain)):
        network(images).square().sum().backward()
        optimizer.step()
    assert all(map(torch.equal, model.parameters(), twin.parameters()))
    hvd.shutdown()


class Digits(torch.utils.data.Dataset[Any]):
    """A custom data set of floating-point images whose pixels identify the sample."""

    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((3, 16, 16), float(index)) + torch.arange(256.0).view(1, 16, 16) / 256, index % 10


def _batches(
    split: Split, spec: InputSpec, device: torch.device, augment: AugmentConfig, processes: int
) -> Iterator[Batch]:
    placement = Placement(device, torch.float32, torch.channels_last)
    reader = reader_for(split, spec, placement, augment, seed=3, processes=processes)
    loader = TrainLoader(reader, Sharding(len(split), 32, seed=3), device, Mixing(augment, 3))
    for epoch in range(2):
        yield from loader.epoch(epoch)
    reader.close()


def _compare_batches(data: ImageData, augment: AugmentConfig, processes: int) -> None:
    """Check that batches on the device equal the CPU's, even if they are read late and overwritten."""
    late: list[torch.Tensor] = []
    labels: list[torch.Tensor] = []
    matrix = torch.randn(size(4096, 64), size(4096, 64), device=DEVICE)
    for batch in _batches(data.train, data.input, DEVICE, augment, processes):
        for _ in range(size(8, 1)):  # keep the device busy for some milliseconds before it reads the batch
            matrix = torch.tanh(matrix @ matrix)
        late.append(batch.images.clone())
        labels.append(batch.labels.clone())
        batch.images.fill_(-1)
        del batch
    expected = list(_batches(data.train, data.input, torch.device("cpu"), augment, 0))
    assert len(expected) == len(late)
    for number, (images, label, there) in enumerate(zip(late, labels, expected, strict=True)):
        assert torch.equal(label.cpu(), there.labels), f"labels of batch {number}"
        # With mixup, devices may round the blended images differently in the last bit.
        difference = float((images.cpu() - there.images).abs().max())
        assert difference <= (1e-5 if augment.mixup else 0.0), f"batch {number} is off by {difference}"
        assert images.is_contiguous(memory_format=torch.channels_last)


def check_prefetched_batches_from_memory_are_the_cpus() -> None:
    data = noise(512, 32)
    _compare_batches(data, AugmentConfig(shift=4, flip=True, cutout=8), 0)


def check_prefetched_mixed_batches_are_the_cpus() -> None:
    _compare_batches(noise(256, 32), AugmentConfig(mixup=0.2, cutmix=1.0), 0)


def check_prefetched_batches_from_loader_processes_are_the_cpus() -> None:
    data = describe_custom("numbers", Digits(), Digits())
    _compare_batches(data, AugmentConfig(), 2)


def check_images_decoded_on_the_device_are_the_cpus() -> None:
    """Decode while the device is busy: decoded images must not share memory with those that are still being resized."""
    _only_with_cuda()
    side = 400
    y, x = np.mgrid[0:side, 0:side]
    with tempfile.TemporaryDirectory() as folder:
        for number in range(128):
            waves = [np.sin((x + 7 * number) / (9 + channel)) + np.cos(y / (5 + number % 9)) for channel in range(3)]
            pixels = np.round(127.5 + 60 * np.stack(waves, 2)).astype(np.uint8)
            Image.fromarray(pixels).save(Path(folder, f"{number:03d}.jpg"), quality=95)
        split = FileSplit(sorted(Path(folder).iterdir()), [0] * 128)
        spec = InputSpec(3, 224, 224, (0.0,) * 3, (1 / 255,) * 3)
        augment = AugmentConfig(flip=True)
        made: list[list[torch.Tensor]] = []
        for busy, on_device in ((True, True), (False, True), (False, False)):
            device = DEVICE if on_device else torch.device("cpu")
            reader = reader_for(split, spec, Placement(device), augment, seed=3, processes=2, on_device=on_device)
            loader = TrainLoader(reader, Sharding(len(split), 16, seed=3), device, Mixing(augment, 3))
            matrix = torch.randn(4096, 4096, device=DEVICE)
            made.append([])
            for epoch in range(2):
                for batch in loader.epoch(epoch):
                    for _ in range(10 if busy else 0):
                        matrix = torch.tanh(matrix @ matrix)
                    made[-1].append(batch.images.clone().cpu() if not busy else batch.images.clone())
                    if not busy:
                        synchronize()
            reader.close()
        for hurried, calm, expected in zip(*made, strict=True):
            assert torch.equal(hurried.cpu(), calm), f"off by {float((hurried.cpu() - calm).abs().max())}"
            difference = (calm - expected).abs()
            assert float(difference.mean()) < 1.0, float(difference.mean())  # of 255; decoders round differently
        print(f"  on average, pixels differ by {float(difference.mean()):.2f} of 255 from the CPU's")


def check_every_precision_learns() -> None:
    for precision in ("fp32", "fp64", "bf16", "O0", "O1", "O2", "O3") if ON_GPU else ("bf16", "O2"):
        with tempfile.TemporaryDirectory() as folder:
            result = train_digits(one_worker(), "lively", Path(folder), precision=precision, epochs=size(4, 2))
            first, *_, last = step_losses(Path(folder))
        assert result.top1 > size(80, 60) / 100, (precision, result.top1)
        assert last < 0.7 * first, (precision, first, last)


def check_an_overflow_skips_the_step_and_halves_the_scale() -> None:
    with tempfile.TemporaryDirectory() as folder:
        config = configure(**digits_settings(Path(folder), precision="O2", loss_scale="dynamic"))
        job = build_job(config, one_worker(), small_digits(), lively_net())
        job.network.replica.train()
        batches = list(job.loading.train_loader.epoch(0))
        weights = [parameter.detach().clone() for parameter in job.network.weights.parameters()]
        poisoned = batches[0]._replace(images=batches[0].images.clone().fill_(60_000.0))
        take_step(job, poisoned, 0)
        loop._settle(job, job.progress.step + 1)  # a device's decision is read a step later
        assert job.optim.precision.loss_scale == 2.0**15, job.optim.precision.loss_scale
        assert all(map(torch.equal, weights, job.network.weights.parameters())), "a skipped step changed weights"
        saved = dict(job.optim.precision.state_dict())
        assert saved["scale"] == 2.0**15
        job.close()


def check_interrupted_and_resumed_is_bitwise_the_same() -> None:
    with deterministic():
        for settings in (
            {},
            {"channels_last": True},
            {"channels_last": True, "precision": "bf16", "ema_decay": 0.9},
            {"channels_last": True, "precision": "O2", "optimizer": "adamw"},
        ):
            with tempfile.TemporaryDirectory() as folder:
                base = Path(folder)
                common = {**settings, "max_steps": 9, "epochs": 2, "lr": 0.01}
                for name in ("whole", "again"):
                    train_digits(one_worker(), "lively", base / name, **common)
                if final_weights(base / "whole") != final_weights(base / "again"):
                    raise Skip(f"the same run twice gives different bits here, with {settings}")
                train_digits(one_worker(), "lively", base / "parts", **{**common, "max_steps": 4})
                train_digits(one_worker(), "lively", base / "parts", **common, resume="auto")
                assert final_weights(base / "parts") == final_weights(base / "whole"), settings
                assert step_losses(base / "parts") == step_losses(base / "whole"), settings


def check_the_device_learns_what_the_cpu_learns() -> None:
    losses = []
    for world in (one_worker(), World(RankInfo(), torch.device("cpu"))):
        with tempfile.TemporaryDirectory() as folder:
            train_digits(world, "plain", Path(folder), precision="fp64", max_steps=12)
            losses.append(step_losses(Path(folder)))
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-9)


def check_captured_passes_have_the_bits_of_plain_ones() -> None:
    """--cuda-graph: dropout, batch norm's buffers, a smaller last batch, evaluations between the epochs."""
    _only_with_cuda()
    for precision in ("fp32", "bf16", "O2"):
        with deterministic(), tempfile.TemporaryDirectory() as folder:
            for name, cuda_graph in (("plain", False), ("graphs", True)):
                settings = {"precision": precision, "cuda_graph": cuda_graph, "max_steps": 25, "epochs": 3}
                train_digits(one_worker(), "lively", Path(folder, name), **{**settings, "global_batch_size": 100})
            plain, graphs = (final_weights(Path(folder, name)) for name in ("plain", "graphs"))
        assert plain == graphs, precision


def check_dataparallel_on_what_is_there_is_one_worker() -> None:
    if ON_GPU and not ON_CUDA:
        raise Skip("torch has no DataParallel for this device")
    losses = []
    for strategy in ("single", "dp"):
        with tempfile.TemporaryDirectory() as folder:
            train_digits(one_worker(), "plain", Path(folder), strategy=strategy, precision="fp64", max_steps=8)
            losses.append(step_losses(Path(folder)))
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-9)


def check_phases_of_the_device_add_up() -> None:
    side = size(4096, 256)
    matrix = torch.randn(side, side, device=DEVICE)
    clock = StepClock(DEVICE)
    for _ in range(2):  # the first one warms up
        synchronize()
        start = time.perf_counter()
        clock.begin("forward")
        for _ in range(50):
            matrix = torch.tanh(matrix @ matrix)
        clock.begin("optimizer")
        clock.end()
        asked = time.perf_counter() - start
        (step,) = clock.take()
        whole = time.perf_counter() - start
    assert 0 < step["forward"] <= whole
    assert step["optimizer"] < 0.1 * step["forward"]
    if ON_CUDA:
        assert asked < step["forward"], "the host waited for the device"


def check_channels_last_and_bf16_agree_with_plain_fp32() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 36, 10))
    model = model.to(DEVICE)
    images, labels = torch.randn(32, 3, 8, 8, device=DEVICE), torch.randint(0, 10, (32,), device=DEVICE)
    gradients = []
    for fast in (False, True):
        order = torch.channels_last if fast else torch.contiguous_format
        model.to(memory_format=order)
        model.zero_grad()
        with torch.autocast(DEVICE.type, dtype=torch.bfloat16, enabled=fast):
            loss = F.cross_entropy(model(images.to(memory_format=order)).float(), labels)
        loss.backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    error = float((gradients[0] - gradients[1]).norm() / gradients[0].norm())
    assert error < 0.05, error


def main() -> int:
    return run_checks(dict(globals()))
